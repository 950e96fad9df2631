"""What is kept of a run."""

import json

from record_run import shortened


def test_figures_keep_six_digits():
    text = json.dumps([{"before": [0.004359834593769128, 1e-12], "seconds": 18.0, "step": 1234567}])
    assert shortened(text) == '[{"before":[0.00435983,1e-12],"seconds":18.0,"step":1234567}]\n'
    assert shortened(shortened(text)) == shortened(text)
