"""Writes the byte tables of docs/cache_layout.md: `python docs/make_tables.py`.

The numbers come from quant/layout.py, the only author of offsets.
"""

from pathlib import Path

from markers import replace_part

from quantmla.quant.format import parse_format
from quantmla.quant.layout import bf16_row_bytes, page_layout

PAGE = Path(__file__).with_name("cache_layout.md")
RANK, ROPE = 512, 64  # of the DeepSeek, Kimi, GLM and LongCat families
PLANES = {
    "content": "content codes [token][channel]",
    "rope": "rope codes [token][channel]",
    "scales": "scales, float16 [group][token]",
    "zero_points": "zero points, uint8 [group][token]",
    "mean": "mean rope key, float16 [channel]",
}


def planes(name: str) -> str:
    """Offsets and sizes of one format's planes."""
    layout = page_layout(RANK, ROPE, parse_format(name))
    lines = [f"| plane of a {name.upper()} page | offset | bytes |", "|---|---:|---:|"]
    for field, text in PLANES.items():
        plane = getattr(layout, field)
        lines.append(f"| {text} | {plane.start:,} | {plane.stop - plane.start:,} |")
    used = sum(getattr(layout, f).stop - getattr(layout, f).start for f in PLANES)
    lines.append(f"| padding | | {layout.page_bytes - used:,} |")
    lines.append(f"| **page** | | **{layout.page_bytes:,}** |")
    return "\n".join(lines)


def formats() -> str:
    """Page bytes of the common formats beside bf16."""
    row = bf16_row_bytes(RANK, ROPE)
    lines = ["| format | bytes of a page | per token | bf16 / this |", "|---|---:|---:|---:|"]
    for name in ("c16r16", "c8r8", "c4r8", "c4r4", "c3r4", "c2r4", "c2r2"):
        fmt = parse_format(name)
        size = page_layout(RANK, ROPE, fmt).page_bytes
        per_token = size / fmt.page_size
        lines.append(f"| {name} | {size:,} | {per_token:g} | {row / per_token:.2f} |")
    return "\n".join(lines)


def render() -> str:
    """The whole file as it should be."""
    return replace_part(PAGE, "tables", "\n\n".join((formats(), planes("c4r4"), planes("c2r4"))))


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
