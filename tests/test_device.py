import pytest
import torch

from quantmla.device import resolve_device
from quantmla.errors import UsageError


def test_auto_is_the_first_gpu_or_the_cpu(monkeypatch: pytest.MonkeyPatch):
    for here, expected in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda here=here: here)
        assert resolve_device("auto") == expected
    assert resolve_device("cpu") == "cpu"


def test_gpus_are_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda") == "cuda"
    assert resolve_device("cuda:1") == "cuda:1"
    with pytest.raises(UsageError, match="device 'cuda:2' is not on this machine"):
        resolve_device("cuda:2")


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "mps", "meta", "cpu:1"])
def test_devices_that_are_not_here(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=f"device '{name}' is not on this machine"):
        resolve_device(name)


@pytest.mark.parametrize("name", ["", "gpu", "cuda:x", "cuda:-1"])
def test_names_that_are_no_device(name: str):
    with pytest.raises(UsageError, match=f"device '{name}' is not"):
        resolve_device(name)
