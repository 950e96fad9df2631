"""Settings of the whole suite: one thread per worker, and no time limit on property tests."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile(
    "quantmla", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("quantmla")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of the tiny float32 model of a case of tiny.CASES, built once; not to be modified."""
    from tiny import build

    root = tmp_path_factory.mktemp("tiny")

    def folder(case: str) -> Path:
        path = root / case
        return path if path.exists() else build(case, path)

    return folder


@pytest.fixture(scope="session")
def tiny_model(
    tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The same with a tokenizer: a whole model folder; not to be modified."""
    from tiny import add_tokenizer

    root = tmp_path_factory.mktemp("model")

    def folder(case: str) -> Path:
        path = root / case
        if not path.exists():
            shutil.copytree(tiny_checkpoint(case), path)
            add_tokenizer(path)
        return path

    return folder


@pytest.fixture
def read_short(short_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages' packaged text is the short one: tokenising all of it takes seconds."""
    from quantmla import evaluation, pipeline
    from quantmla.capture.tokens import read_text

    for stage in (evaluation, pipeline):
        monkeypatch.setattr(stage, "read_text", lambda path=None: read_text(path or short_text))


@pytest.fixture(scope="session")
def short_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20,000 characters of the packaged calibration text."""
    from tiny import write_text

    return write_text(tmp_path_factory.mktemp("text") / "short.txt")
