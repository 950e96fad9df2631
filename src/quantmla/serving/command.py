"""Checks a checkpoint, flags and the machine; then prints vLLM's command and becomes it."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from quantmla.arch import adapter_for
from quantmla.checkpoint.locate import read_config
from quantmla.doctor import gpus, versions
from quantmla.errors import UnsupportedModel, UsageError, require
from quantmla.manifest import read_manifest
from quantmla.quant.format import CacheFormat
from quantmla.quant.mixed import format_from_json, uniform_format
from quantmla.serve.settings import why_not_served
from quantmla.serving.config_file import with_config_file
from quantmla.serving.refusals import BACKEND, KNOWN, VLLM_RELEASE, check, names_backend
from quantmla.serving.vllm_arguments import given


def check_checkpoint(model: str) -> tuple[str, CacheFormat]:
    """Family and format of a quantised checkpoint that the plugin can serve.

    UsageError where `model` is not quantised, UnsupportedModel where it cannot be served.
    """
    config = read_config(model)
    manifest = read_manifest(config, model)
    family, fmt = adapter_for(config).model_type, format_from_json(manifest["format"])
    reason = why_not_served(config, family, fmt)
    require(reason is None, f"{model} {reason}", UnsupportedModel)
    one = uniform_format(fmt)
    assert one is not None  # others are not served
    return family, one


def serve_command(model: str, arguments: Sequence[str]) -> list[str]:
    """The `vllm serve` command for a quantised checkpoint.

    Raises as `check_checkpoint`; UsageError where an argument cannot hold with its cache.
    """
    family, fmt = check_checkpoint(model)
    named = [argument for argument in arguments if argument.split("=")[0] == "--model"]
    require(not named, f"--model: the model is {model}", UsageError)
    found = given(with_config_file(arguments), KNOWN)
    check(found, family, fmt)
    backend = () if names_backend(found) else BACKEND
    return ["vllm", "serve", model, *backend, *arguments]


def check_machine() -> None:
    """UsageError where vLLM or the GPU is missing or another one."""
    found = versions()["vllm"]
    require(
        found is not None and found.startswith(f"{VLLM_RELEASE}."),
        f"vllm {VLLM_RELEASE} is needed and {found or 'none'} is installed: "
        'pip install "quantmla[vllm]"',
        UsageError,
    )
    capabilities = [gpu["capability"] for gpu in gpus()]
    require(
        bool(capabilities) and all(c == "9.0" for c in capabilities),
        "serving needs GPUs of compute capability 9.0 (H100, H200), and torch sees "
        f"{', '.join(capabilities) or 'none'}",
        UsageError,
    )


def vllm_program() -> str:
    """Its path, beside this Python or on the PATH; UsageError where there is none."""
    beside = Path(sys.executable).with_name("vllm")
    program = str(beside) if beside.is_file() else shutil.which("vllm")
    require(program is not None, "the vllm program is not on the PATH", UsageError)
    assert program is not None
    return program


def serve(model: str, arguments: Sequence[str], *, only_print: bool) -> None:
    """Prints the vllm command and becomes it; with `only_print` that is all.

    vLLM and the GPU are not looked at for printing.
    """
    command = serve_command(model, arguments)
    if only_print:
        print(shlex.join(command), flush=True)
        return
    check_machine()
    program = vllm_program()
    print(shlex.join(command), flush=True)
    os.execv(program, command)
