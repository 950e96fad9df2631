"""What a model is, from its config and the headers of its weight files alone."""

import json
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from quantmla.arch import adapter_for
from quantmla.errors import QuantMLAError, UnsupportedModel, UsageError, require
from quantmla.estimate import num_cached_layers
from quantmla.recipe import PACKAGED_MODEL

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Facts about one model; None where the model does not say."""

    model: str
    model_type: str | None
    architecture: str | None
    supported: bool
    reason: str | None  # why it is not supported
    attention: dict[str, Any] | None  # the sizes of MlaGeometry
    rope_order: str | None  # order of the rope rows in the weights
    layers: int | None
    cached_layers: int | None  # latent attentions that keep a cache
    mtp_layers: int
    weight_dtypes: dict[str, int]  # bytes by dtype; empty without weight files
    config_dtype: str | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def model_folder(model: str) -> Path | None:
    """The local folder of a packaged or local model; None for a hub id."""
    if model == PACKAGED_MODEL and not Path(model).exists():
        return Path(str(files("quantmla") / "assets" / PACKAGED_MODEL))
    path = Path(model)
    if path.is_dir():
        return path
    return path.parent if path.is_file() else None


def read_config(model: str) -> dict[str, Any]:
    """config.json of a folder, of that file itself, of the packaged model or of a hub id."""
    folder = model_folder(model)
    if folder is None:
        path = _download_config(model)
    else:
        path = Path(model) if Path(model).is_file() else folder / "config.json"
    require(path.is_file(), f"model {model!r} has no config.json", UsageError)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise QuantMLAError(f"{path} is not JSON: {error}") from None
    require(isinstance(config, dict), f"{path} holds no JSON object")
    return config


def _download_config(model: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, "config.json"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"model {model!r} is no folder, no config.json, not {PACKAGED_MODEL!r}, "
            f"and the hub does not give it: {reason}"
        ) from None


def weight_dtypes(folder: Path) -> dict[str, int]:
    """Bytes by dtype over all safetensors headers in a folder."""
    total: Counter[str] = Counter()
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in _header(path).items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                total[entry["dtype"]] += end - start
    return dict(total)


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        require(0 < length <= MAX_HEADER_BYTES, f"{path} is not a whole safetensors file")
        body = file.read(length)
    try:
        header = json.loads(body)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise QuantMLAError(f"{path} is not a whole safetensors file") from None
    assert isinstance(header, dict)
    return header


def inspect_model(model: str) -> Inspection:
    """Everything that config.json and the weights' headers tell; no weight is read."""
    config = read_config(model)
    folder = model_folder(model)
    facts: dict[str, Any] = {"attention": None, "rope_order": None, "cached_layers": None}
    reason = None
    try:
        facts = _attention(config)
    except UnsupportedModel as error:
        reason = str(error)
    text = config.get("text_config") or config
    return Inspection(
        model=model,
        model_type=text.get("model_type"),
        architecture=next(iter(config.get("architectures") or ()), None),
        supported=reason is None,
        reason=reason,
        layers=text.get("num_hidden_layers") or text.get("num_layers"),
        mtp_layers=int(text.get("num_nextn_predict_layers") or 0),
        weight_dtypes={} if folder is None else weight_dtypes(folder),
        config_dtype=config.get("dtype") or config.get("torch_dtype"),
        **facts,
    )


def _attention(config: Mapping[str, Any]) -> dict[str, Any]:
    adapter = adapter_for(config)
    geometry = adapter.geometry(config)
    return {
        "attention": asdict(geometry),
        "rope_order": adapter.weight_rope_order if geometry.rotated else "not rotated",
        "cached_layers": num_cached_layers(config),
    }
