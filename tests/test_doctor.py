"""What works on a machine, for machines that this one is not."""

import pytest

from quantmla import doctor

HOPPER = {"name": "NVIDIA H200", "memory": 0, "capability": "9.0"}
AMPERE = {"name": "NVIDIA A100", "memory": 0, "capability": "8.0"}


def works(monkeypatch, devices, installed):
    monkeypatch.setattr(doctor, "gpus", lambda: devices)
    monkeypatch.setattr(doctor, "find_spec", lambda name: name if name in installed else None)
    return doctor.diagnose()["works"]


@pytest.mark.parametrize(
    ("devices", "installed", "feature", "says"),
    [
        ([HOPPER], ("triton", "vllm"), "vllm plugin", "yes"),
        ([HOPPER], ("cuda", "cuda.bindings", "vllm"), "vllm plugin", "yes"),
        ([HOPPER], ("vllm",), "vllm plugin", "no: cuda-bindings is not installed"),
        ([HOPPER], ("triton",), "hopper kernels", "no: cuda-bindings is not installed"),
        ([HOPPER], ("triton", "cuda"), "hopper kernels", "no: cuda-bindings is not installed"),
        ([HOPPER], ("cuda", "cuda.bindings"), "hopper kernels", "yes"),
        ([AMPERE], ("cuda",), "hopper kernels", "no: needs a GPU of compute capability 9.0"),
        ([], ("cuda", "cuda.bindings"), "hopper kernels", "no: torch sees no CUDA GPU"),
        ([AMPERE], ("triton", "vllm"), "vllm plugin", "no: needs a GPU of compute capability 9.0"),
        ([], ("triton", "vllm"), "vllm plugin", "no: torch sees no CUDA GPU"),
        ([HOPPER], ("triton",), "vllm plugin", "no: vllm is not installed"),
        ([AMPERE], ("triton",), "triton kernels", "yes"),
        ([], ("lm_eval",), "eval --tasks", "yes"),
        ([HOPPER], (), "eval --tasks", "no: lm-eval is not installed"),
    ],
)
def test_a_feature_works_or_the_first_reason_is_given(
    monkeypatch, devices, installed, feature, says
):
    assert works(monkeypatch, devices, installed)[feature] == says
