"""Which of vLLM's flags cannot hold with a packed cache, said before vLLM is loaded.

The plugin refuses the same at vLLM's start (`quantmla.serve.vllm.support`), and more.
"""

from collections.abc import Mapping
from typing import Any

from quantmla.errors import UsageError, require
from quantmla.quant.format import CacheFormat
from quantmla.serve.settings import CACHE_DTYPES, DRAFTERS, MAX_DRAFTS, NOT_COMPILED
from quantmla.serving.vllm_arguments import (
    ATTENTION,
    COMPILATION,
    CONFIGS,
    SPECULATIVE,
    TRANSFER,
    Known,
)

VLLM_RELEASE = "0.26"
BACKEND = ("--attention-backend", "CUSTOM")
# A flag and what it may be.
ALLOWED_VALUES: dict[str, tuple[str, ...]] = {
    BACKEND[0]: (BACKEND[1],),
    "--block-size": ("64",),
    "--kv-cache-dtype": CACHE_DTYPES,
    "--dtype": ("auto", "bfloat16"),
    "--decode-context-parallel-size": ("1",),
    "--prefill-context-parallel-size": ("1",),
    "--pipeline-parallel-size": ("1",),
    "--ubatch-size": ("0", "1"),
}
# What cannot be given at all, and why, as the end of a sentence.
REFUSED_VALUES: dict[str, str] = {
    TRANSFER: "connectors move pages without the bf16 window that belongs to them",
    "--kv-offloading-size": "offloading moves pages without the bf16 window that belongs to them",
    "--kv-cache-dtype-skip-layers": "every layer's cache has the checkpoint's format",
}
REFUSED_SWITCHES: dict[str, str] = {
    "--disable-hybrid-kv-cache-manager": "pages and the bf16 window are two groups of one pool",
    "--calculate-kv-scales": "scales are stored in the pages",
    "--enable-dbo": "micro-batches that overlap are not handled",
    "--enable-sleep-mode": "what steps read beside the pages would be lost",
}
KNOWN = Known(
    values=(
        *ALLOWED_VALUES,
        *(name for name in REFUSED_VALUES if name not in CONFIGS),
        "--scheduling-policy",
    ),
    switches=(*REFUSED_SWITCHES, "--enforce-eager", "--enable-prefix-caching"),
)
FUSED_PASS = "fuse_rope_kvcache_cat_mla"
OFF = ("false", "0", "no", "off", "n", "f")  # of a setting that is on or off, in lower case
UNCHOSEN = ("none", "auto")  # a backend that vLLM chooses itself
SUFFIX_TREE = ("suffix_decoding_max_tree_depth", 24)  # vLLM's default; so many drafts at most


def check(found: Mapping[str, Any], family: str, fmt: CacheFormat) -> None:
    """UsageError for flags, as `vllm_arguments.given` reads them, that cannot hold together.

    For a checkpoint of this family with a cache in `fmt`.
    """
    for name, reason in (REFUSED_VALUES | REFUSED_SWITCHES).items():
        require(
            found.get(name, False) is False,
            f"{name} cannot be used with a packed cache: {reason}",
            UsageError,
        )
    for name, allowed in ALLOWED_VALUES.items():
        if name in found:
            value, choice = found[name], f"with a packed cache it must be {' or '.join(allowed)}"
            require(bool(value), f"{name} needs a value: {choice}", UsageError)
            known = value.lower() in map(str.lower, allowed)
            require(known, f"{name} {value}: {choice}", UsageError)
    if found.get(SPECULATIVE):
        _check_draft(found[SPECULATIVE], fmt)
    _check_attention(found)
    _check_compilation(found.get(COMPILATION, {}))
    require(
        found.get("--scheduling-policy") != "priority"
        or not found.get("--enable-prefix-caching", True),
        f"--scheduling-policy priority: vllm {VLLM_RELEASE} reuses pages of a request that it "
        "preempted before they were computed; add --no-enable-prefix-caching",
        UsageError,
    )
    require(
        family not in NOT_COMPILED or found.get("--enforce-eager", False),
        f"vllm {VLLM_RELEASE} cannot compile a {family}, whatever its cache: add --enforce-eager",
        UsageError,
    )


def names_backend(found: Mapping[str, Any]) -> bool:
    """Whether the flags name the plugin's backend already."""
    return BACKEND[0] in found or _is_ours(found.get(ATTENTION, {}).get("backend"))


def _is_ours(backend: Any) -> bool:
    return str(backend).lower() == BACKEND[1].lower()


def _check_attention(found: Mapping[str, Any]) -> None:
    """The backend has a flag and a setting in vLLM, and one more for each kind of cache."""
    attention = found.get(ATTENTION, {})
    kinds = attention.get("backend_per_kind")
    of_kinds = list(kinds.values()) if isinstance(kinds, dict) else [kinds] if kinds else []
    chosen = [b for b in (attention.get("backend"), *of_kinds) if str(b).lower() not in UNCHOSEN]
    other = next((backend for backend in chosen if not _is_ours(backend)), None)
    require(
        other is None,
        f"{ATTENTION} has backend {other}: with a packed cache it must be {BACKEND[1]}",
        UsageError,
    )
    require(
        BACKEND[0] not in found or not _is_ours(attention.get("backend")),
        f"{BACKEND[0]} and the backend of {ATTENTION} are both given, and vLLM takes one of them",
        UsageError,
    )


def _check_compilation(compilation: Mapping[str, Any]) -> None:
    passes = compilation.get("pass_config")
    fused = passes.get(FUSED_PASS) if isinstance(passes, dict) else None
    require(
        fused is None or str(fused).lower() in OFF,
        f"{COMPILATION} has pass_config.{FUSED_PASS} {fused}: it would write bf16 rows into "
        "packed pages",
        UsageError,
    )


def _check_draft(settings: Mapping[str, Any], fmt: CacheFormat) -> None:
    draft = {key.replace("-", "_"): value for key, value in settings.items()}
    method, model = draft.get("method"), draft.get("model")
    if method is None and model in ("ngram", "[ngram]"):
        method = "ngram"
    said = "names no method" if method is None else f"has method {method!r}"
    require(
        method in DRAFTERS,
        f"{SPECULATIVE} {said}: drafts must need no cache of their own, as those of "
        f"{', '.join(DRAFTERS)}",
        UsageError,
    )
    count = draft.get("num_speculative_tokens")
    if count is None and method == "suffix":
        count = draft.get(*SUFFIX_TREE)
    most = min(MAX_DRAFTS, MAX_DRAFTS if fmt.recent_window is None else fmt.recent_window)
    require(
        count is None or str(count) in map(str, range(1, most + 1)),
        f"{SPECULATIVE} has num_speculative_tokens {count}: it must be 1 to {most} (at most "
        f"{MAX_DRAFTS}, and the tokens of the recent window)",
        UsageError,
    )
