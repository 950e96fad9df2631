"""vLLM's answers on a GPU: those of transformers with the same packed cache.

`make serve-test` runs these, with a Python that has torch with CUDA and vllm. All engines run side
by side (benchmarks/answers_engines.py); what they leave is in pytest's folder, `--basetemp`.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from answers_engines import ENGINES, possible

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The folder of all engines' answers; `answers.json` there is a result file."""
    folder = tmp_path_factory.mktemp("answers")
    command = [sys.executable, str(BENCHMARKS / "serve_answers.py"), "all", str(folder)]
    command += ["--output", str(folder / "answers.json")]
    done = subprocess.run(command, text=True, capture_output=True)
    print(done.stdout, done.stderr[-4000:])
    return folder


@pytest.mark.parametrize("name", ENGINES)
def test_r39b_r41_r42_answers_are_those_of_transformers(work, name):
    """Chats, prefixes, chunks, ragged batches, preemption, drafts; by both model runners."""
    if name not in possible(torch.cuda.device_count()):
        pytest.skip(f"needs {ENGINES[name].gpus} GPUs")
    folder = work / name
    assert (folder / "lines.json").exists(), (folder / "log.txt").read_text()[-6000:]
    lines = json.loads((folder / "lines.json").read_text())
    assert {line["case"]: line["fault"] for line in lines if line["fault"]} == {}
    found = json.loads((folder / "answers.json").read_text())
    if ENGINES[name].drafts:
        drafted = [n for r in found["requests"] for _, n in r["steps"][1:] if n > 1]
        assert drafted, "no n-gram was ever drafted"
        return
    assert found["preemptions"] > 0
    assert found["runner"] == ENGINES[name].runner
    pages = [r["pages"] for r in found["requests"] if r["pages"]]
    assert len(pages) == (5 if ENGINES[name].gpus == 1 else 0)
    assert all(page["packed_again"] >= 1 for page in pages)
    digests = {tuple(page["digests"]) for page in pages}
    assert len(digests) <= 1, "a page's bytes depend on how its tokens arrived"


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
