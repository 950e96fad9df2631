"""Settings of the whole suite: one thread per worker, and no time limit on property tests."""

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
