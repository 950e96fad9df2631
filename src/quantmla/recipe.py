"""What a run is made of: five parts, as a YAML file or as flags, checked before work starts.

A resolved recipe is written into every output, so a result can be made again from it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    ValidationError,
    field_validator,
    model_validator,
)

from quantmla.errors import UsageError, require
from quantmla.quant.format import CacheFormat, RangeRule, RopeCentring, parse_format
from quantmla.quant.mixed import ModelFormat, model_format


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Model(_Part):
    """Which checkpoint: a folder, a hub id, or the packaged model."""

    id: str = Field(default="nano", min_length=1)
    revision: str | None = None


class Calibration(_Part):
    """What the learner sees; amounts of None are the method's own. Lengths are in tokens."""

    text: str | None = None  # a file; None: the packaged calibration text
    num_sequences: int | None = Field(default=None, ge=1)
    sequence_length: int | None = Field(default=None, ge=64)
    held_out_sequences: int | None = Field(default=None, ge=1)  # to choose by, never learned from
    seed: int = Field(default=0, ge=0, lt=2**32)
    device: str = "auto"  # auto: a GPU where there is one, else the CPU


class _Widths(_Part):
    """Bits by name; None takes what the name implies."""

    name: str = "c4r4"
    rope_centring: RopeCentring | None = None
    rope_bands: int | None = None

    @field_validator("name")
    @classmethod
    def _canonical(cls, name: str) -> str:
        return parse_format(name).name

    def widths(self, **shared: Any) -> CacheFormat:
        """The format of these bits, with every field decided."""
        changes = {"rope_centring": self.rope_centring, "rope_bands": self.rope_bands, **shared}
        return parse_format(self.name, **{k: v for k, v in changes.items() if v is not None})


class LayerFormat(_Widths):
    """What one layer has of its own; `c2r4` alone is short for `{name: c2r4}`."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class Format(_Widths):
    """How the cache is stored. Everything but the bits is shared by all layers."""

    group_size: int | None = None
    sinks: int | None = None
    recent: int | None = None
    range_rule: RangeRule | None = None
    layers: dict[NonNegativeInt, LayerFormat] = Field(default_factory=dict)  # by cache index

    def cache_format(self) -> ModelFormat:
        """The format with every field decided."""
        shared = {
            "group_size": self.group_size,
            "num_sink_tokens": self.sinks,
            "recent_window": self.recent,
            "range_rule": self.range_rule,
        }
        layers = {index: layer.widths(**shared) for index, layer in self.layers.items()}
        return model_format(self.widths(**shared), layers)


class Transform(_Part):
    """Which method learns, and its options by name; the method checks them."""

    method: str = "quantmla"
    options: dict[str, Any] = Field(default_factory=dict)


class Output(_Part):
    folder: str | None = None


class Recipe(_Part):
    """The whole run."""

    version: Literal[1] = 1
    model: Model = Model()
    calibration: Calibration = Calibration()
    format: Format = Format()
    transform: Transform = Transform()
    output: Output = Output()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """What `quantmla eval` was asked; None leaves a choice to the evaluation."""

    model: str
    baseline: str | None = None
    methods: tuple[str, ...] = ()
    format: str | None = None
    sinks: int | None = None
    recent: int | None = None
    unprotected: bool = False
    text: str | None = None
    context: int | None = None  # tokens per sequence
    limit: int | None = None  # sequences
    device: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRequest:
    """What `quantmla eval --tasks` was asked; `evaluation.limit` counts items of a task."""

    evaluation: EvaluationRequest
    tasks: tuple[str, ...]
    output: str  # the run folder
    data: str | None = None  # a folder of data files; None: the hub
    engine: Literal["transformers", "vllm"] = "transformers"
    resume: bool = False
    max_new_tokens: int | None = None  # of every answer, where a task allows more
    run_code: bool = False  # consent to run what the model writes


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisRequest:
    """What `quantmla analyze` was asked."""

    model: str
    output: str  # folder
    preset: str = "default"
    studies: tuple[str, ...] = ()  # none: all
    texts: tuple[str, ...] = ()  # files; none: the packaged two
    budget: float | None = None  # bytes per token and layer, for a bit plan
    device: str = "auto"
    resume: bool = False
    overwrite: bool = False


def recipe_from(data: Mapping[str, Any]) -> Recipe:
    """A checked recipe; UsageError names the key and what is allowed."""
    try:
        recipe = Recipe.model_validate(dict(data))
    except ValidationError as error:
        raise UsageError(_sentence(error)) from None
    recipe.format.cache_format()
    return recipe


def with_changes(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """A recipe with `part.key` values replaced, those of None left as they are."""
    data = recipe.model_dump()
    for dotted, value in changes.items():
        if value is not None:
            part, key = dotted.split(".")
            data[part][key] = value
    return recipe_from(data)


def resolved(recipe: Recipe, amounts: Mapping[str, int]) -> Recipe:
    """The recipe with every calibration amount decided: its own, else the method's."""
    calibration = recipe.calibration
    missing = {k: v for k, v in amounts.items() if getattr(calibration, k) is None}
    return with_changes(recipe, {f"calibration.{k}": v for k, v in missing.items()})


def decided(recipe: Recipe, options: Mapping[str, Any]) -> Recipe:
    """The recipe with what a format's name or a default stood for written out."""
    every = recipe.format.cache_format()
    fmt = every if isinstance(every, CacheFormat) else every.default
    layers = {} if isinstance(every, CacheFormat) else every.layers
    changes = {
        "format.group_size": fmt.group_size,
        "format.rope_centring": fmt.rope_centring,
        "format.rope_bands": fmt.rope_bands,
        "format.sinks": fmt.num_sink_tokens,
        "format.recent": fmt.recent_window,
        "format.range_rule": fmt.range_rule,
        "format.layers": {index: _decided_widths(one) for index, one in layers.items()},
        "transform.options": dict(options),
    }
    return with_changes(recipe, changes)


def _decided_widths(fmt: CacheFormat) -> dict[str, Any]:
    return {
        "name": fmt.name,
        "rope_centring": fmt.rope_centring,
        "rope_bands": fmt.rope_bands,
    }


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML's own loader lets the last of equal keys win."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Here, as merges (`<<`) have not yet added keys that may be replaced."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            merge = key.tag == "tag:yaml.org,2002:merge"
            name = key.value if merge else self.construct_object(key)
            require(
                name not in seen,
                f"recipe key {name!r} is given twice, again in line {key.start_mark.line + 1}: "
                "keep one of them",
                UsageError,
            )
            seen.add(name)
        return node


def load_recipe(path: Path) -> Recipe:
    """Reads a YAML recipe."""
    require(os.path.isfile(path), f"recipe {path} is not a file", UsageError)
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        place = " ".join(str(error).split())
        raise UsageError(f"recipe {path} is not YAML: {place}") from None
    parts = tuple(Recipe.model_fields)
    require(
        isinstance(data, dict), f"recipe {path} must be a mapping with keys of {parts}", UsageError
    )
    return recipe_from(data)


def to_yaml(recipe: Recipe) -> str:
    """The recipe as YAML, every key included; `load_recipe` reads it back."""
    return yaml.safe_dump(recipe.model_dump(), sort_keys=False, allow_unicode=True)


def _sentence(error: ValidationError) -> str:
    """The first fault as one line."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown recipe key {where!r}; allowed here: {', '.join(_siblings(first['loc']))}"
    return (
        f"recipe key {where!r} is {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
    )


def _siblings(loc: tuple[int | str, ...]) -> list[str]:
    fields = Recipe.model_fields
    if loc[:2] == ("format", "layers"):
        return list(LayerFormat.model_fields)
    if len(loc) > 1:
        part = fields[str(loc[0])].annotation
        assert isinstance(part, type)
        assert issubclass(part, BaseModel)
        fields = part.model_fields
    return list(fields)
