import json

import torch

from quantmla import __version__
from quantmla.run_record import SCHEMA, VERSION, run_record


def test_it_names_versions_and_machine():
    found = json.loads(run_record({"seed": 3}))
    assert found["run"] == {"seed": 3}
    assert (found["schema"], found["version"]) == (SCHEMA, VERSION)
    assert found["header"]["versions"]["quantmla"] == __version__
    assert found["header"]["processor"]
    assert found["header"]["cpu_threads"] == torch.get_num_threads()
