"""Arguments of `vllm serve` as vLLM reads them.

Dashes and underscores are alike, the last of a flag counts, `--no-X` takes `--X` back, and the
settings of a config are JSON or follow the flag's name after a dot.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from quantmla.errors import UsageError, require
from quantmla.serving.config_file import FLAG as CONFIG_FILE

ATTENTION, COMPILATION = "--attention-config", "--compilation-config"
SPECULATIVE = "--speculative-config"
CONFIGS = (ATTENTION, COMPILATION, SPECULATIVE)
SHORT = {
    "-ac": ATTENTION,
    "-cc": COMPILATION,
    "-sc": SPECULATIVE,
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
}
OTHER_SHORT = ("-dc",)  # vLLM's --diffusion-config, which -dcp begins with
DRAFT_FLAGS = {  # what vLLM writes into the speculative config
    "--spec-method": "method",
    "--spec-model": "model",
    "--spec-tokens": "num_speculative_tokens",
}
UNSET_WORDS = ("None", "", None)  # which vLLM takes for a flag that is not given


def given(arguments: Sequence[str], looked_at: Collection[str]) -> dict[str, Any]:
    """What vLLM makes of flags that are `looked_at`, configs and drafts, by their long names.

    A config is a dict, a flag that was taken back False, any other its last value; None where no
    value follows. UsageError for what cannot be told: a shortened flag, a config in several parts.
    """
    whole = {*looked_at, *CONFIGS, *DRAFT_FLAGS, CONFIG_FILE}
    found: dict[str, Any] = {}
    ways: dict[str, str] = {}  # how a config was given
    for name, path, value in _flags(arguments):
        flag = SHORT.get(name, name)
        _require_written_out(name, whole)
        require(flag != CONFIG_FILE, f"{name}={value}: write {CONFIG_FILE} {value}", UsageError)
        if flag in CONFIGS:
            way = name if path else "JSON"
            require(
                ways.setdefault(flag, way) == way and not (way == "JSON" and flag in found),
                f"{flag} is given in several parts, of which vLLM keeps one: give it once, as "
                "JSON or under dotted names",
                UsageError,
            )
            found[flag] = _merged(found.get(flag, {}), _settings(name, path, value))
        elif flag.startswith("--no-") and f"--{flag[5:]}" in whole:
            found[f"--{flag[5:]}"] = False
        elif flag in whole:
            found[flag] = value
    drafts = {key: found.pop(flag) for flag, key in DRAFT_FLAGS.items() if flag in found}
    drafts = {key: value for key, value in drafts.items() if value not in UNSET_WORDS}
    if drafts:
        found[SPECULATIVE] = found.get(SPECULATIVE, {}) | drafts
    return found


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...], str | None]]:
    """Flags, the names after their dots, and the value that follows, if one does."""
    taken = -1  # a value that is no flag, whatever it begins with
    for i, argument in enumerate(arguments):
        if i == taken or not argument.startswith("-"):
            continue
        word, equals, value = argument.partition("=")
        name, *path = word.split(".")
        after = arguments[i + 1] if i + 1 < len(arguments) else None
        if path and not equals:
            taken = i + 1
        follows = after if path or after is None or not after.startswith("--") else None
        if name.startswith("--"):
            name = name.replace("_", "-")
        yield name, tuple(path), value if equals else follows


def _require_written_out(name: str, whole: Collection[str]) -> None:
    """vLLM takes the beginning of a flag for all of it."""
    bare = f"--{name[5:]}" if name.startswith("--no-") else name
    if bare in whole or name in (*SHORT, *OTHER_SHORT, "-", "--", "--no-"):
        return
    known = sorted(whole) if name.startswith("--") else SHORT
    meant = next((flag for flag in known if flag.startswith((name, bare))), None)
    meant = SHORT.get(str(meant), meant)
    require(meant is None, f"{name} may be {meant}: write the flag out", UsageError)


def _settings(name: str, path: Sequence[str], value: str | None) -> Mapping[str, Any]:
    said = ".".join((name, *path))
    require(bool(value), f"{said} needs a value", UsageError)
    try:
        settings = json.loads(value or "")
    except RecursionError:
        raise UsageError(f"{said} is nested too deeply") from None
    except ValueError:
        settings = value
    if not path and settings in UNSET_WORDS:
        return {}
    for key in reversed(path):
        settings = {key: settings}
    require(isinstance(settings, dict), f"{said} {value!r} is not a JSON object", UsageError)
    return dict(settings)


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    both = {key for key in new if isinstance(old.get(key), dict) and isinstance(new[key], dict)}
    return {**old, **new, **{key: _merged(old[key], new[key]) for key in both}}
