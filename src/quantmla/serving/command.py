"""Checks a checkpoint, flags and the machine; then prints vLLM's command and becomes it."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantmla.arch import adapter_for
from quantmla.checkpoint.locate import read_config
from quantmla.doctor import gpus, versions
from quantmla.errors import UnsupportedModel, UsageError, require
from quantmla.manifest import read_manifest
from quantmla.quant.mixed import format_from_json
from quantmla.serve.settings import NOT_COMPILED, why_not_served

VLLM_RELEASE = "0.26"
BACKEND = ("--attention-backend", "CUSTOM")
MOST_DRAFT_TOKENS = 15

# A flag and what it may be. Values are compared in lower case.
ALLOWED_VALUES: dict[str, tuple[str, ...]] = {
    "--attention-backend": ("custom",),
    "--block-size": ("64",),
    "--kv-cache-dtype": ("auto", "bfloat16"),
    "--dtype": ("auto", "bfloat16"),
    "--decode-context-parallel-size": ("1",),
    "-dcp": ("1",),
    "--prefill-context-parallel-size": ("1",),
    "-pcp": ("1",),
}
# A flag that cannot be given at all, and why, as the end of a sentence.
REFUSED: dict[str, str] = {
    "--kv-transfer-config": "connectors move pages without the bf16 window that belongs to them",
    "--kv-offloading-size": "offloading moves pages without the bf16 window that belongs to them",
    "--disable-hybrid-kv-cache-manager": "pages and the bf16 window are two groups of one pool",
    "--kv-cache-dtype-skip-layers": "every layer's cache has the checkpoint's format",
    "--calculate-kv-scales": "scales are stored in the pages",
    "--enable-dbo": "micro-batches that overlap are not handled",
    "--ubatch-size": "micro-batches that overlap are not handled",
    "--enable-sleep-mode": "what steps read beside the pages would be lost",
}
DRAFTS_WITHOUT_CACHE = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")


def check_checkpoint(model: str) -> str:
    """The family of a quantised checkpoint that the plugin can serve.

    UsageError where `model` is not quantised, UnsupportedModel where it cannot be served.
    """
    config = read_config(model)
    manifest = read_manifest(config, model)
    family = adapter_for(config).model_type
    reason = why_not_served(config, family, format_from_json(manifest["format"]))
    require(reason is None, f"{model} {reason}", UnsupportedModel)
    return family


def serve_command(model: str, arguments: Sequence[str]) -> list[str]:
    """The `vllm serve` command for a quantised checkpoint.

    Raises as `check_checkpoint`; UsageError where an argument cannot hold with its cache.
    """
    family = check_checkpoint(model)
    _check(arguments)
    given = {name for name, _ in _flags(arguments)}
    require(
        family not in NOT_COMPILED or "--enforce-eager" in given,
        f"vllm {VLLM_RELEASE} cannot compile a {family}, whatever its cache: add --enforce-eager",
        UsageError,
    )
    backend = [] if BACKEND[0] in given else BACKEND
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


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Flags in vLLM's long spelling, with the value that follows, if one does."""
    for i, argument in enumerate(arguments):
        if not argument.startswith("-"):
            continue
        name, equals, value = argument.partition("=")
        after = arguments[i + 1] if i + 1 < len(arguments) else None
        follows = after if after is not None and not after.startswith("--") else None
        yield name.replace("_", "-"), value if equals else follows


def _check(arguments: Sequence[str]) -> None:
    draft: dict[str, Any] = {}
    for name, value in _flags(arguments):
        reason = REFUSED.get(name.split(".")[0])
        require(reason is None, f"{name} cannot be used with a packed cache: {reason}", UsageError)
        allowed = ALLOWED_VALUES.get(name)
        require(
            allowed is None or (value or "").lower() in allowed,
            f"{name} {value}: with a packed cache it must be {' or '.join(allowed or ())}",
            UsageError,
        )
        if name in ("--speculative-config", "-sc"):
            draft |= _json(name, value)
        elif name.startswith("--speculative-config."):
            draft[name.partition(".")[2].replace("-", "_")] = value
    if draft:
        _check_draft(draft)
    given = dict(_flags(arguments))
    require(
        given.get("--scheduling-policy") != "priority" or "--no-enable-prefix-caching" in given,
        f"--scheduling-policy priority: vllm {VLLM_RELEASE} reuses pages of a request that it "
        "preempted before they were computed; add --no-enable-prefix-caching",
        UsageError,
    )


def _json(name: str, value: str | None) -> Mapping[str, Any]:
    try:
        found = json.loads(value or "")
    except ValueError:
        found = None
    require(isinstance(found, dict), f"{name} {value!r} is not a JSON object", UsageError)
    assert isinstance(found, dict)
    return found


def _check_draft(draft: Mapping[str, Any]) -> None:
    method = draft.get("method")
    require(
        method in DRAFTS_WITHOUT_CACHE,
        f"--speculative-config has method {method!r}, whose drafts need a cache of their own: use "
        f"one of {', '.join(DRAFTS_WITHOUT_CACHE)}",
        UsageError,
    )
    count = str(draft.get("num_speculative_tokens", 1))
    require(
        count.isdecimal() and 1 <= int(count) <= MOST_DRAFT_TOKENS,
        f"--speculative-config has num_speculative_tokens {count}: it must be 1 to "
        f"{MOST_DRAFT_TOKENS}",
        UsageError,
    )
