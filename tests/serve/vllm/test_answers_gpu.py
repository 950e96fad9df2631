"""vLLM's answers on a GPU: those of transformers with the same packed cache.

`make serve-test` runs these, with a Python that has torch with CUDA and vllm.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from answers_reference import compare

from quantmla.checkpoint.locate import locate
from quantmla.quant.format import parse_format

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """nano with the settings of a format, not fused: quantising costs more, answers must agree."""

    def make(name):
        folder = tmp_path_factory.mktemp(name)
        for path in locate("nano").iterdir():
            (folder / path.name).symlink_to(path)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").unlink()
        settings = {"version": 1, "format": parse_format(name).to_json(), "ignored_layers": []}
        (folder / "config.json").write_text(json.dumps(config | {"quantmla_config": settings}))
        return folder

    return make


def served(folder, *flags, **variables):
    """What an engine in a process of its own answered."""
    from bench_serve import environment

    file = folder / "answers.json"
    command = [sys.executable, str(BENCHMARKS / "serve_answers.py"), "collect", str(folder)]
    command += [str(file), *flags]
    done = subprocess.run(command, env=environment() | variables, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(file.read_text())


def faults(folder, found):
    return {line["case"]: line["fault"] for line in compare(str(folder), found) if line["fault"]}


@pytest.mark.parametrize("runner", ["0", "1"])
@pytest.mark.parametrize("name", ["c4r4", "c2r4"])
def test_r06_r38_r39b_r42_answers_are_those_of_transformers(checkpoint, name, runner):
    """Chats, prefixes, chunks, ragged batches, preemption; by both of vLLM's model runners."""
    folder = checkpoint(name)
    found = served(folder, VLLM_USE_V2_MODEL_RUNNER=runner)
    assert found["preemptions"] > 0
    assert faults(folder, found) == {}
    pages = [r["pages"] for r in found["requests"] if r["pages"]]
    assert len(pages) == 5
    assert all(page["packed_again"] >= 1 for page in pages)
    digests = {tuple(page["digests"]) for page in pages}
    assert len(digests) == 1, "a page's bytes depend on how its tokens arrived"


def test_r41_drafts_change_no_answer(checkpoint):
    folder = checkpoint("c4r4")
    found = served(folder, "--drafts", "3")
    drafted = [n for r in found["requests"] for _, n in r["steps"][1:] if n > 1]
    assert drafted, "no n-gram was ever drafted"
    assert faults(folder, found) == {}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_r12_answers_with_two_gpus(checkpoint):
    folder = checkpoint("c4r4")
    assert faults(folder, served(folder, "--tensor-parallel", "2")) == {}


def test_every_family_starts_and_decodes():
    from bench_serve import environment

    command = [sys.executable, str(BENCHMARKS / "serve_families.py")]
    done = subprocess.run(command, env=environment(), text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-6000:]
    for line in done.stdout.splitlines():
        found = json.loads(line)
        assert found["decoded"] == [32, 32, 32]
        assert found["finite"]
        assert found["bytes_per_token"] == [320]  # what was allocated, not what was asked
        assert found["packed_layers"] in ((2, 4) if found["family"] == "longcat_flash" else (2,))
