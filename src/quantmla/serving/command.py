"""Checks a checkpoint, flags and the machine; then prints vLLM's command and becomes it."""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantmla.arch import adapter_for
from quantmla.checkpoint.locate import read_config
from quantmla.doctor import gpus, versions
from quantmla.errors import UnsupportedModel, UsageError, require
from quantmla.manifest import read_manifest
from quantmla.quant.mixed import format_from_json
from quantmla.serve.settings import NOT_COMPILED, why_not_served
from quantmla.serving.config_file import with_config_file
from quantmla.serving.vllm_arguments import ATTENTION, COMPILATION, SPECULATIVE, given

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
    "--prefill-context-parallel-size": ("1",),
    "--ubatch-size": ("0",),
}
# A flag that cannot be given at all, and why, as the end of a sentence.
REFUSED: dict[str, str] = {
    "--kv-transfer-config": "connectors move pages without the bf16 window that belongs to them",
    "--kv-offloading-size": "offloading moves pages without the bf16 window that belongs to them",
    "--disable-hybrid-kv-cache-manager": "pages and the bf16 window are two groups of one pool",
    "--kv-cache-dtype-skip-layers": "every layer's cache has the checkpoint's format",
    "--calculate-kv-scales": "scales are stored in the pages",
    "--enable-dbo": "micro-batches that overlap are not handled",
    "--enable-sleep-mode": "what steps read beside the pages would be lost",
}
FUSED_PASS = "fuse_rope_kvcache_cat_mla"
OTHERS = ("--enforce-eager", "--enable-prefix-caching", "--scheduling-policy")
UNSET = ("none", "false", "0", "no", "off", "n", "f")  # of a switch, as vLLM reads them
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
    found = given(with_config_file(arguments), (*ALLOWED_VALUES, *REFUSED, *OTHERS))
    _check(found)
    named = BACKEND[0] in found or _is_ours(found.get(ATTENTION, {}).get("backend"))
    require(
        family not in NOT_COMPILED or found.get("--enforce-eager", False) is not False,
        f"vllm {VLLM_RELEASE} cannot compile a {family}, whatever its cache: add --enforce-eager",
        UsageError,
    )
    return ["vllm", "serve", model, *(() if named else BACKEND), *arguments]


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


def _check(found: Mapping[str, Any]) -> None:
    """Of flags as vLLM reads them, by their long names."""
    for name, reason in REFUSED.items():
        on = found.get(name, False) not in (False, "None", "")  # nulls, as vLLM reads them
        require(not on, f"{name} cannot be used with a packed cache: {reason}", UsageError)
    for name, allowed in ALLOWED_VALUES.items():
        if name in found:
            value, choice = found[name], f"with a packed cache it must be {' or '.join(allowed)}"
            require(bool(value), f"{name} needs a value: {choice}", UsageError)
            require(str(value).lower() in allowed, f"{name} {value}: {choice}", UsageError)
    if found.get(SPECULATIVE):
        _check_draft(found[SPECULATIVE])
    _check_attention(found.get(ATTENTION, {}))
    _check_compilation(found.get(COMPILATION, {}))
    caching = found.get("--enable-prefix-caching", True) is not False
    require(
        found.get("--scheduling-policy") != "priority" or not caching,
        f"--scheduling-policy priority: vllm {VLLM_RELEASE} reuses pages of a request that it "
        "preempted before they were computed; add --no-enable-prefix-caching",
        UsageError,
    )


def _is_ours(backend: Any) -> bool:
    return str(backend).lower() in ALLOWED_VALUES[BACKEND[0]]


def _check_attention(attention: Mapping[str, Any]) -> None:
    """The backend has two flags in vLLM, and one more for each kind of cache."""
    kinds = attention.get("backend_per_kind")
    of_kinds = list(kinds.values()) if isinstance(kinds, dict) else [kinds] if kinds else []
    chosen = [
        b for b in (attention.get("backend"), *of_kinds) if str(b).lower() not in ("none", "auto")
    ]
    other = next((backend for backend in chosen if not _is_ours(backend)), None)
    require(
        other is None,
        f"--attention-config has backend {other}: with a packed cache it must be {BACKEND[1]}",
        UsageError,
    )


def _check_compilation(compilation: Mapping[str, Any]) -> None:
    passes = compilation.get("pass_config")
    fused = passes.get(FUSED_PASS) if isinstance(passes, dict) else None
    require(
        str(fused).lower() in UNSET,
        f"--compilation-config has pass_config.{FUSED_PASS} {fused}: it would write bf16 rows into "
        "packed pages",
        UsageError,
    )


def _check_draft(draft: Mapping[str, Any]) -> None:
    draft = {key.replace("-", "_"): value for key, value in draft.items()}
    method = draft.get("method")
    require(
        method in DRAFTS_WITHOUT_CACHE,
        f"--speculative-config has method {method!r}, whose drafts need a cache of their own: use "
        f"one of {', '.join(DRAFTS_WITHOUT_CACHE)}",
        UsageError,
    )
    count = str(draft.get("num_speculative_tokens", 1))
    require(
        count in map(str, range(1, MOST_DRAFT_TOKENS + 1)),
        f"--speculative-config has num_speculative_tokens {count}: it must be 1 to "
        f"{MOST_DRAFT_TOKENS}",
        UsageError,
    )
