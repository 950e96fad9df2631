"""lm-eval's model of transformers, with every key read as a cache of the variant's format gives it.

Scores of given texts come from one teacher-forced pass, in which each position sees what decoding
would have seen: never from the unquantised first forward pass of a cache. Texts are written by
decoding through the cache itself.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor, nn

from quantmla.evaluate.simulated_cache import simulated_cache
from quantmla.evaluate.teacher_forced import teacher_forced
from quantmla.evaluate.variant import Variant
from quantmla.quant.format import parse_format
from quantmla.quant.mixed import ModelFormat, distinct_formats
from quantmla.serve.transformers import QuantMLACache
from quantmla.tasks.build import quiet

BATCH = 8
BF16 = parse_format("c16r16")  # what is not quantised is a cache, too, of bf16 rows
Done = Callable[[int], None]  # requests answered


def read_format(variant: Variant) -> ModelFormat:
    """The format that a variant's keys are read in."""
    return BF16 if variant.fmt is None else variant.fmt


def variant_cache(model: nn.Module, variant: Variant, mask_BT: Tensor | None) -> QuantMLACache:
    """An empty cache: packed, or simulated where a transform has not been fused into the weights.

    The published quantiser has no bytes either, and is simulated.
    """
    fmt = read_format(variant)
    has_bytes = all(one.range_rule == "hold_zero" for one in distinct_formats(fmt))
    if variant.transforms is None and has_bytes:
        return QuantMLACache(model.config, fmt, mask_BT, variant.rope_order)
    return simulated_cache(model, fmt, mask_BT, variant.transforms, variant.rope_order)


class PackedCacheLM(HFLM):
    """A variant of `base` as lm-eval asks for it."""

    def __init__(self, base: nn.Module, tokenizer: Any, variant: Variant, done: Done):
        self.variant, self.done = variant, done
        self.cache_bytes = 0  # of the largest batch
        self.truncated = 0  # requests whose beginning did not fit into the model's positions
        model: Any = base if variant.model is None else variant.model
        with quiet():
            super().__init__(
                pretrained=model,
                tokenizer=tokenizer,
                batch_size=BATCH,
                backend="causal",
                max_length=int(model.config.max_position_embeddings),
            )

    def _model_call(self, inps: Tensor, attn_mask: Any = None, labels: Any = None) -> Tensor:
        v = self.variant
        reading = teacher_forced(self.model, read_format(v), v.transforms, rope_order=v.rope_order)
        with torch.inference_mode(), reading:
            logits: Tensor = self.model(input_ids=inps, use_cache=False).logits
        self.done(len(inps))
        return logits

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> Tensor:
        cache = variant_cache(self.model, self.variant, generation_kwargs["attention_mask"])
        with torch.inference_mode(), warnings.catch_warnings():
            # newer transformers call the argument `cache`, and take both names
            warnings.simplefilter("ignore", FutureWarning)
            written: Tensor = super()._model_generate(
                context, max_length, stop, past_key_values=cache, **generation_kwargs
            )
        self.cache_bytes = max(self.cache_bytes, cache.allocated_bytes())
        self.done(len(written))
        return written

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        ids_BT, mask_BT = super().tok_batch_encode(strings, padding_side, None, truncation)
        if left_truncate_len is None:
            return ids_BT, mask_BT
        self.truncated += int((mask_BT.sum(1) > left_truncate_len).sum())
        return ids_BT[:, -left_truncate_len:], mask_BT[:, -left_truncate_len:]

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = True, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        most = self.max_length + 1
        self.truncated += sum(len(context) + len(text) > most for _, context, text in requests)
        return super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
        return super().generate_until(requests, disable_tqdm=True)
