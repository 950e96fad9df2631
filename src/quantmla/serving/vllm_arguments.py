"""Arguments of `vllm serve` as vLLM reads them.

Dashes and underscores are alike, and the last of a flag counts: `--no-X` takes `--X` back. Settings
of a config are JSON, or follow the flag's name after a dot; vLLM puts the latter behind all others.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from quantmla.errors import UsageError, require
from quantmla.serving.config_file import FLAG as CONFIG_FILE

ATTENTION, COMPILATION = "--attention-config", "--compilation-config"
SPECULATIVE, TRANSFER = "--speculative-config", "--kv-transfer-config"
CONFIGS = (ATTENTION, COMPILATION, SPECULATIVE, TRANSFER)
SHORT = {
    "-ac": ATTENTION,
    "-cc": COMPILATION,
    "-sc": SPECULATIVE,
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
}
OTHER_SHORT = ("-dc",)  # vLLM's --diffusion-config, which -dcp begins with
DRAFT_FLAGS = {  # what vLLM writes into the speculative config
    "--spec-method": "method",
    "--spec-model": "model",
    "--spec-tokens": "num_speculative_tokens",
}
OPTIONAL = (*DRAFT_FLAGS, "--kv-offloading-size")  # may be given as one of NOT_GIVEN
NOT_GIVEN = ("None", "")
MOST_NAMES = 20  # after dots


class Known(NamedTuple):
    """Flags to look for, in their long spelling."""

    values: tuple[str, ...]  # one value follows, or several
    switches: tuple[str, ...]

    @property
    def all(self) -> set[str]:
        return {*self.values, *self.switches, *CONFIGS, *DRAFT_FLAGS, CONFIG_FILE}


def given(arguments: Sequence[str], known: Known) -> dict[str, Any]:
    """What vLLM makes of the flags that are known, by their long names.

    A switch is True or False, a config a dict, any other flag its last value, or None where no
    value follows. What is given as null is left out. Flags of DRAFT_FLAGS stand in the speculative
    config. UsageError for what cannot be told: a shortened flag, a config in several parts.
    """
    found: dict[str, Any] = {}
    ways: dict[str, str] = {}  # how a config was given
    for name, path, value in _flags(arguments):
        flag, negated = SHORT.get(name, name), f"--{name[5:]}"
        _require_written_out(name, known)
        require(flag != CONFIG_FILE, f"{name}={value}: write {CONFIG_FILE} {value}", UsageError)
        if flag in CONFIGS:
            way = name if path else "JSON"
            require(
                ways.setdefault(flag, way) == way and not (way == "JSON" and flag in found),
                f"{flag} is given in several parts, of which vLLM keeps one: give it once, as "
                "JSON or under dotted names",
                UsageError,
            )
            settings = _settings(name, path, value)
            found[flag] = settings if settings is None else _merged(found.get(flag, {}), settings)
        elif name.startswith("--no-") and negated in known.switches:
            found[negated] = False
        elif flag in known.switches:
            found[flag] = True
        elif flag in known.all:
            found[flag] = value
    nulls = [k for k in CONFIGS if found.get(k, {}) is None]
    nulls += [k for k in OPTIONAL if found.get(k) in NOT_GIVEN]
    found = {k: v for k, v in found.items() if k not in nulls}
    drafts = {key: found.pop(flag) for flag, key in DRAFT_FLAGS.items() if flag in found}
    if drafts:
        found[SPECULATIVE] = found.get(SPECULATIVE, {}) | drafts
    return found


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...], str | None]]:
    """Flags, the names after their dots, and the value that follows, if one does."""
    taken = -1  # a value that is no flag, whatever it begins with
    for i, argument in enumerate(arguments):
        level = argument.startswith("-O")  # vLLM's -O2, which may have a dot
        if i == taken or level or not argument.startswith("-"):
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


def _require_written_out(name: str, known: Known) -> None:
    """vLLM takes the beginning of a flag for all of it."""
    if name in ("-", "--", *OTHER_SHORT):
        return
    flags = {flag: flag for flag in known.all} | SHORT
    flags |= {f"--no-{flag[2:]}": flag for flag in known.switches}
    meant = sorted(whole for flag, whole in flags.items() if flag.startswith(name))
    require(
        name in flags or not meant,
        f"{name} may be {meant[0] if meant else ''}: write the flag out",
        UsageError,
    )


def _settings(name: str, path: Sequence[str], value: str | None) -> dict[str, Any] | None:
    said = ".".join((name, *path))
    require(value is not None, f"{said} needs a value", UsageError)
    assert value is not None
    if not path and value in NOT_GIVEN:
        return None
    require(len(path) <= MOST_NAMES, f"{name} is nested too deeply", UsageError)
    settings: Any = value
    suffixed = not path and SHORT.get(name, name) != SPECULATIVE  # as vLLM reads the others
    try:
        settings = json.loads(_plain_numbers(value) if suffixed else value)
    except RecursionError:
        raise UsageError(f"{said} is nested too deeply") from None
    except ValueError:  # a text, as vLLM takes it
        pass
    if settings is None and not path:
        return None
    for key in reversed(path):
        settings = {key: settings}
    require(isinstance(settings, dict), f"{said} {value!r} is not a JSON object", UsageError)
    return dict(settings)


def _plain_numbers(value: str) -> str:
    """JSON without the suffix of numbers such as 1k; we look at none of these."""
    text_or_number = r'("(?:[^"\\]|\\.)*")|\b(\d+(?:\.\d+)?)[kKmMgGtT]\b'
    return re.sub(text_or_number, lambda found: found[1] or found[2], value)


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    both = {key for key in new if isinstance(old.get(key), dict) and isinstance(new[key], dict)}
    return {**old, **new, **{key: _merged(old[key], new[key]) for key in both}}
