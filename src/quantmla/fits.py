"""Transforms of the packaged model, learned beforehand by methods that a laptop waits long for.

One file per model digest, method and format; `benchmarks/bench_quality.py` writes them.
"""

from importlib import resources
from pathlib import Path

from quantmla.transform.layer import LayerTransform
from quantmla.transform.store import transforms_from_file


def fit_name(digest: str, method: str, format_name: str) -> str:
    return f"{digest[:16]}-{method}-{format_name}.safetensors"


def packaged_fit(digest: str, method: str, format_name: str) -> dict[str, LayerTransform] | None:
    """Transforms by attention prefix, or None where none is packaged for just this model."""
    file = resources.files("quantmla") / "assets" / "fits" / fit_name(digest, method, format_name)
    with resources.as_file(file) as path:
        return transforms_from_file(Path(path)) if Path(path).is_file() else None
