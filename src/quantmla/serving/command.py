"""Checks a checkpoint, flags and the machine; then prints vLLM's command and becomes it."""

import json
import os
import re
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
from quantmla.serving.config_file import with_config_file

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
# Flags that hold settings, as JSON or under dotted names, by vLLM's short spelling.
CONFIGS = {
    "-sc": "--speculative-config",
    "-ac": "--attention-config",
    "-cc": "--compilation-config",
}
FUSED_PASS = "fuse_rope_kvcache_cat_mla"
LOOKED_AT = (*ALLOWED_VALUES, *REFUSED, *CONFIGS.values(), "--scheduling-policy")
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
    seen = with_config_file(arguments)
    _check(seen)
    given = {name for name, _ in _flags(seen)}
    named = BACKEND[0] in given or _is_ours(_configs(seen)["-ac"].get("backend"))
    require(
        family not in NOT_COMPILED or "--enforce-eager" in given,
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
    for name, value in _flags(arguments):
        flag = name.split(".")[0]
        reason = REFUSED.get(flag)
        if flag not in LOOKED_AT and re.match("--.", flag):  # vLLM takes beginnings for the whole
            meant = next((whole for whole in LOOKED_AT if whole.startswith(flag)), None)
            require(meant is None, f"{flag} may be {meant}: write the flag out", UsageError)
        require(reason is None, f"{name} cannot be used with a packed cache: {reason}", UsageError)
        allowed = ALLOWED_VALUES.get(name)
        if allowed is not None:
            choice = f"with a packed cache it must be {' or '.join(allowed)}"
            require(bool(value), f"{name} needs a value: {choice}", UsageError)
            require(str(value).lower() in allowed, f"{name} {value}: {choice}", UsageError)
    configs = _configs(arguments)
    if configs["-sc"]:
        _check_draft(configs["-sc"])
    _check_attention(configs["-ac"])
    _check_compilation(configs["-cc"])
    given = dict(_flags(arguments))
    require(
        given.get("--scheduling-policy") != "priority" or "--no-enable-prefix-caching" in given,
        f"--scheduling-policy priority: vllm {VLLM_RELEASE} reuses pages of a request that it "
        "preempted before they were computed; add --no-enable-prefix-caching",
        UsageError,
    )


def _configs(arguments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What each of CONFIGS is given in all its flags together, by its short spelling."""
    found: dict[str, dict[str, Any]] = {short: {} for short in CONFIGS}
    shorts = {name: short for short, long in CONFIGS.items() for name in (short, long)}
    for name, value in _flags(arguments):
        flag, _, path = name.partition(".")
        if flag not in shorts:
            continue
        require(bool(value), f"{name} needs a value", UsageError)
        given = _json(value)
        for key in reversed(path.replace("-", "_").split(".") if path else ()):
            given = {key: given}
        require(isinstance(given, dict), f"{name} {value!r} is not a JSON object", UsageError)
        found[shorts[flag]] = _merged(found[shorts[flag]], given)
    return found


def _json(value: str | None) -> Any:
    """A value as vLLM reads it: JSON, or else the text itself."""
    try:
        return json.loads(value or "")
    except ValueError:
        return value


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    both = {key for key in new if isinstance(old.get(key), dict) and isinstance(new[key], dict)}
    return {**old, **new, **{key: _merged(old[key], new[key]) for key in both}}


def _is_ours(backend: Any) -> bool:
    return str(backend).lower() in ALLOWED_VALUES[BACKEND[0]]


def _check_attention(attention: Mapping[str, Any]) -> None:
    """The backend has two flags in vLLM, and one more for each kind of cache."""
    kinds = attention.get("backend_per_kind")
    of_kinds = list(kinds.values()) if isinstance(kinds, dict) else [kinds] if kinds else []
    chosen = [b for b in (attention.get("backend"), *of_kinds) if str(b) not in ("None", "auto")]
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
