"""Several methods on the same text and the same needles, at equal protection."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from quantmla.errors import UsageError, require
from quantmla.evaluate.divergence import Bucket
from quantmla.evaluate.perplexity import Progress, TextResult, measure_text, token_windows
from quantmla.evaluate.retrieval import KINDS, Kind, Needle, make_needles, measure_recall
from quantmla.evaluate.table import ContextRow, Row
from quantmla.evaluate.teacher_forced import latent_attentions
from quantmla.evaluate.variant import Variant, require_equal_protection
from quantmla.quant.layout import bf16_row_bytes, page_layout

BASELINE = Variant(name="bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How much is evaluated. Lengths are in tokens."""

    context: int = 2048
    limit: int | None = None  # windows of the text
    needles: int = 0  # of each kind; 0: recall is not measured
    needle_context: int = 4096
    kinds: tuple[Kind, ...] = KINDS
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.needles >= 0, f"needles {self.needles} is negative", UsageError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """All that was measured of one variant; `row` is its line in the table."""

    row: Row
    text: TextResult
    recall: dict[str, float] = field(default_factory=dict)  # by kind of needle


def bytes_per_token(model: nn.Module, variant: Variant) -> float:
    """Packed bytes of one token in one layer, averaged over the model's latent layers."""
    sizes = {
        index: (int(m.kv_lora_rank), int(m.qk_rope_head_dim))  # type: ignore[arg-type]
        for index, m in latent_attentions(model).items()
    }
    fmt = variant.fmt
    if fmt is None:
        return sum(bf16_row_bytes(*size) for size in sizes.values()) / len(sizes)
    pages = [page_layout(*size, fmt.for_layer(i)).page_bytes for i, size in sizes.items()]
    return sum(pages) / fmt.page_size / len(sizes)


def _needles(tokenizer: Any, text: str, settings: Settings) -> list[Needle]:
    if settings.needles == 0:
        return []
    return make_needles(
        tokenizer,
        text,
        context=settings.needle_context,
        count=settings.needles,
        kinds=settings.kinds,
        seed=settings.seed,
    )


def evaluation_inputs(
    tokenizer: Any, text: str, settings: Settings
) -> tuple[list[Tensor], list[Needle]]:
    """Windows of the text and needles. Raises UsageError where the text is too short for them."""
    windows = token_windows(tokenizer, text, settings.context, settings.limit)
    return windows, _needles(tokenizer, text, settings)


def measure(
    base_model: nn.Module,
    tokenizer: Any,
    variants: Sequence[Variant],
    text: str,
    settings: Settings,
    progress: Progress | None = None,
) -> list[Measurement]:
    """The unquantised base model first, then every variant against it, in the order given."""
    every = [BASELINE, *variants]
    require_equal_protection(every)
    windows, needles = evaluation_inputs(tokenizer, text, settings)
    texts = measure_text(base_model, every, windows, progress)
    recalls = measure_recall(base_model, every, needles, progress)
    sizes = [bytes_per_token(base_model, variant) for variant in every]
    return [
        Measurement(row=_row(variant, result, recall, size), text=result, recall=recall)
        for variant, result, recall, size in zip(every, texts, recalls, sizes, strict=True)
    ]


def compare(
    base_model: nn.Module,
    tokenizer: Any,
    variants: Sequence[Variant],
    text: str,
    settings: Settings,
    progress: Progress | None = None,
) -> list[Row]:
    """`measure`, as rows of the table."""
    found = measure(base_model, tokenizer, variants, text, settings, progress)
    return [measurement.row for measurement in found]


def _row(variant: Variant, text: TextResult, recall: dict[str, float], size: float) -> Row:
    fmt, overall = variant.fmt, text.overall
    return Row(
        method=variant.name,
        format="bf16" if fmt is None else fmt.name,
        sinks=0 if fmt is None else fmt.num_sink_tokens,
        recent=None if fmt is None else fmt.recent_window,
        perplexity=overall.perplexity,
        kl_mean=overall.kl_mean,
        kl_p99=overall.kl_p99,
        kl_max=overall.kl_max,
        top1=overall.top1,
        recall=sum(recall.values()) / len(recall) if recall else None,
        tokens=overall.tokens,
        bytes_per_token=size,
        by_context=tuple(_context_row(bucket) for bucket in text.buckets),
    )


def _context_row(bucket: Bucket) -> ContextRow:
    found = bucket.divergence
    return ContextRow(
        first=bucket.first,
        end=bucket.end,
        tokens=found.tokens,
        perplexity=found.perplexity,
        kl_mean=found.kl_mean,
        kl_p99=found.kl_p99,
        kl_max=found.kl_max,
        top1=found.top1,
    )
