"""One attention's capture while it grows.

B sequences, S tokens of each, N heads, R latent rank, P content and E rope channels per head.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from quantmla.arch.adapter import AttentionSite
from quantmla.capture.layer import LayerCapture
from quantmla.capture.record import Taken
from quantmla.capture.store import Rows, Shape, open_rows
from quantmla.checkpoint.source import require_finite
from quantmla.errors import QuantMLAError, require
from quantmla.mla.geometry import MlaGeometry
from quantmla.mla.rope import RopeOrder, to_interleaved


def capture_shapes(
    g: MlaGeometry, shape_BS: tuple[int, ...], latent_dtype: torch.dtype, dtype: torch.dtype
) -> dict[str, Shape]:
    """Sizes of a LayerCapture's tensors."""
    heads = (*shape_BS, g.num_heads)
    return {
        "unit_latent_BSR": Shape((*shape_BS, g.kv_lora_rank), latent_dtype),
        "k_rope_BSE": Shape((*shape_BS, g.qk_rope_head_dim), dtype),
        "q_content_BSNP": Shape((*heads, g.qk_nope_head_dim), dtype),
        "q_rope_BSNE": Shape((*heads, g.qk_rope_head_dim), dtype),
    }


@dataclass(kw_only=True)
class SiteRows:
    """Takes each batch's activations, converts them to our rope order, and gives the capture."""

    site: AttentionSite
    geometry: MlaGeometry
    rope_order: RopeOrder  # of the model's own cache
    softmax_scale: float
    shape_BS: tuple[int, ...]
    dtypes: tuple[torch.dtype, torch.dtype]  # of latents, of queries and keys
    folder: Path | None
    memory_limit: int  # bytes; a larger capture goes to the folder, if there is one
    _rows: dict[str, Rows] = field(init=False)

    def __post_init__(self) -> None:
        shapes = capture_shapes(self.geometry, self.shape_BS, *self.dtypes)
        on_disk = sum(shape.num_bytes for shape in shapes.values()) > self.memory_limit
        self._rows = {}
        for name, shape in shapes.items():
            path = None
            if on_disk and self.folder is not None:
                path = self.folder / f"capture_{self.site.cache_index}_{name}.safetensors"
            self._rows[name] = open_rows(shape, path)

    def append(self, taken: Taken) -> None:
        where = f"layer {self.site.layer} ({self.site.prefix})"
        require(
            {"unit_latent", "k_rope", "query"} <= taken.keys() and taken["query"].numel() > 0,
            f"{where} saw no calibration tokens: its attention did not run",
            QuantMLAError,
        )
        for name, x in taken.items():
            require_finite(f"{where}: {name} on calibration tokens", x)
        content, rope = taken["query"].split(
            (self.geometry.qk_nope_head_dim, self.geometry.qk_rope_head_dim), dim=-1
        )
        batch: dict[str, Tensor] = {
            "unit_latent_BSR": taken["unit_latent"],
            "k_rope_BSE": to_interleaved(taken["k_rope"], self.rope_order),
            "q_content_BSNP": content,
            "q_rope_BSNE": to_interleaved(rope, self.rope_order),
        }
        for name, x in batch.items():
            self._rows[name].append(x)
        taken.clear()

    def finish(self) -> LayerCapture:
        return LayerCapture(
            **{name: rows.finish() for name, rows in self._rows.items()},
            softmax_scale=self.softmax_scale,
            rope_order=self.rope_order,
        )

    def discard(self) -> None:
        for rows in self._rows.values():
            rows.discard()
