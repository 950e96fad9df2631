"""The bf16 window in vLLM's pool: what a layer asks for, and which pages a request keeps.

Window pages hold the rows of the last tokens and of the first ones (sinks). A chunk of a prompt
takes pages only for the tokens that will still be in the window when the chunk is done: the others
are packed from the step's own rows and leave a null page in the table.

A prefix hit ends on a page border. If the rows before the border are still there, decode reads
what it read then. If not, the hit is shortened by the recent window: those tokens are computed
again, on packed pages and sinks alone, and leave their rows. So every token that is new sees its
recent window in bf16 (in a short chunk half of it, pool.short_chunk), and a hit is never lost to
the window.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from typing_extensions import override

from quantmla.quant.format import CacheFormat
from quantmla.serve.settings import MAX_DRAFTS
from quantmla.serve.vllm.engine import (
    KVCacheSpecRegistry,
    SlidingWindowManager,
    SlidingWindowMLASpec,
    resolve_block_hashes,
)
from quantmla.serve.vllm.pool import table_pages


@dataclass(frozen=True, kw_only=True)
class WindowSpec(SlidingWindowMLASpec):
    """bf16 rows of one layer; `sliding_window` is the pool layout's kept_tokens."""

    fmt: CacheFormat
    refreshed_tokens: int
    sink_pages: int
    max_pages: int  # that a request holds at once, at most

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        del max_in_flight_tokens  # a chunk's rows are not kept
        return min(self.max_pages, self.table_pages(max_model_len))

    @override
    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        return self.table_pages(max_len)

    @override
    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Of the longest request, and the pool's block that stands for none.

        vLLM counts that one among the blocks that requests can have. Without it here, the longest
        prompts that are let in at the start would never be, and would hold up all others.
        """
        admitted = self.max_admission_blocks_per_request(
            vllm_config.max_in_flight_tokens, vllm_config.model_config.max_model_len
        )
        return (admitted + 1) * self.page_size_bytes

    def table_pages(self, tokens: int) -> int:
        """Of a sequence's table."""
        return table_pages(tokens, self.fmt.page_size, self.block_size)

    @classmethod
    def merge(cls, specs: "list[WindowSpec]") -> "WindowSpec":
        assert all(spec == specs[0] for spec in specs), "window specs of one group differ"
        return replace(specs[0])


class NewPages(NamedTuple):
    """Pages that a request's table gains, in their order."""

    sinks: int
    nulls: int  # of tokens that are packed from the step's own rows
    kept: int

    @property
    def taken(self) -> int:
        return self.sinks + self.kept


class WindowBlocks(SlidingWindowManager):
    """Window pages of every request.

    They come and go with packed pages: a decode takes those of the next packed page at once (in two
    parts where steps are in flight), and gives back those of the one that was packed. Between,
    which is in most steps of a decode, nothing happens, and vLLM has no table to write.
    """

    def __init__(self, kv_cache_spec: WindowSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.cleared: dict[str, int] = {}  # pages before this one are freed, sinks apart

    def _end(self, request_id: str, num_tokens: int) -> int:
        """One past the last page that a request of so many tokens is given.

        Not all of the next packed page where pages before the window are not freed yet, as with
        steps in flight: a request in decode holds no more than the window for it, and takes the
        rest as soon as they are, so that its room is not taken for free. And no more than its
        tokens need where these are less than a page.
        """
        size, page = self.block_size, self.kv_cache_spec.fmt.page_size
        ahead = self.kv_cache_spec.table_pages(num_tokens) if num_tokens > page else 0
        held = self.cleared.get(request_id, 0) + self.sliding_window // size
        return max(-(-num_tokens // size), min(ahead, held))

    def _new_pages(
        self, request_id: str, held: int, num_tokens: int, num_tokens_main_model: int
    ) -> NewPages | None:
        """From page number `held` on; None in most steps of a decode.

        Pages are kept that are read after a step that ends at `num_tokens`, drafts included.
        """
        end = self._end(request_id, num_tokens)
        if held >= end:
            return None
        sinks = min(end, max(held, self.kv_cache_spec.sink_pages))
        read = max(0, num_tokens_main_model - self.sliding_window - MAX_DRAFTS)
        first = min(end, max(sinks, read // self.block_size))
        return NewPages(sinks - held, first - sinks, end - first)

    @override
    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Any],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
    ) -> int:
        blocks = self.req_to_blocks.get(request_id, ())
        held = len(blocks) + len(new_computed_blocks)
        pages = self._new_pages(request_id, held, num_tokens, num_tokens_main_model)
        new = pages.taken if pages else 0
        if apply_admission_cap:  # once for a request, before it begins
            real = sum(not block.is_null for block in (*blocks, *new_computed_blocks))
            new = max(new, self._most_pages(num_tokens) - real)
        if not new_computed_blocks:
            return new
        return new + self._get_num_evictable_blocks(new_computed_blocks)

    def _most_pages(self, num_tokens: int) -> int:
        """That a request of so many tokens may hold at once before they are computed.

        More than at their end: the window of one chunk is freed after that of the next is taken. A
        prompt that is let in where only its end fits would preempt itself in every step.
        """
        most, whole = self._max_admission_blocks_per_request, -(-num_tokens // self.block_size)
        return whole if most is None else min(most, whole)

    @override
    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[Any]:
        blocks = self.req_to_blocks[request_id]
        pages = self._new_pages(request_id, len(blocks), num_tokens, num_tokens_main_model)
        if pages is None:
            return []
        taken = self.block_pool.get_new_blocks(pages.taken)
        nulls = [self._null_block] * pages.nulls
        new = [*taken[: pages.sinks], *nulls, *taken[pages.sinks :]]
        blocks.extend(new)
        return new

    @override
    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[Any],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        assert num_external_computed_tokens == 0, "KV connectors are refused at start"
        assert not self.req_to_blocks[request_id]
        self.block_pool.touch([block for block in new_computed_blocks if not block.is_null])
        self.req_to_blocks[request_id].extend(new_computed_blocks)
        self.num_cached_block[request_id] = len(new_computed_blocks)

    @override
    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Frees what no step after `processed_computed_tokens` reads: what it has packed.

        Null pages may lie between pages, so all are looked at, each once. An answer's, several for
        each packed page, serve no hit but one within it: they are taken again before others.
        """
        spec = self.kv_cache_spec
        last = spec.fmt.first_recent(processed_computed_tokens) // self.block_size
        begin = self.cleared.get(request_id, spec.sink_pages)
        if last <= begin:
            return
        blocks = self.req_to_blocks[request_id]
        end = min(last, len(blocks))
        freed, useless = [], set()
        answer = end if num_prompt_tokens is None else -(-num_prompt_tokens // self.block_size)
        for i in range(begin, end):
            if not blocks[i].is_null:
                freed.append(blocks[i])
                if i >= answer and blocks[i].ref_cnt == 1:
                    useless.add(blocks[i].block_id)
                blocks[i] = self._null_block
        self.cleared[request_id] = max(begin, end)
        self.block_pool.evict_blocks(useless)
        self.block_pool.free_blocks(reversed(freed))

    @override
    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        self.cleared.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    @classmethod
    @override
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: WindowSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[Any], ...], int]:
        assert not drop_eagle_block, "drafters with a cache are refused at start"
        assert dcp_world_size == pcp_world_size == 1, "context parallelism is refused at start"
        hashes = resolve_block_hashes(
            block_hashes, block_pool.hash_block_size, kv_cache_spec.block_size
        )

        def cached(index: int) -> Any:
            return block_pool.get_cached_block(hashes[index], kv_cache_group_ids)

        return longest_hit(
            cached,
            block_pool.null_block,
            kv_cache_spec,
            (
                max_length // alignment_tokens * alignment_tokens,
                alignment_tokens,
                len(kv_cache_group_ids),
            ),
        )

    @classmethod
    @override
    def reachable_block_mask(cls, start_block: int, *args: Any, **kwargs: Any) -> Any:
        """With sparse retention, too, a prefix needs its sinks."""
        mask = super().reachable_block_mask(start_block, *args, **kwargs)
        if mask and start_block < kwargs["kv_cache_spec"].sink_pages:
            mask[0] = True
        return mask


def longest_hit(
    cached: Any, null_block: Any, spec: WindowSpec, bounds: tuple[int, int, int]
) -> tuple[tuple[list[Any], ...], int]:
    """Pages by group and tokens of the hit; `cached` gives page i of every group, or None.

    `bounds` are the longest hit, a multiple of the alignment, the alignment, and the groups.
    """
    longest, alignment, groups = bounds
    none: tuple[list[Any], ...] = tuple([] for _ in range(groups))
    found = {i: cached(i) for i in range(spec.sink_pages)} if longest else {}
    if not longest or not all(found.values()):
        return none, 0
    shortest = max(0, longest - spec.refreshed_tokens)
    for length in range(longest, shortest - 1, -alignment):
        first = max(0, length - spec.refreshed_tokens) // spec.block_size
        pages = range(length // spec.block_size - 1, first - 1, -1)
        window = {}
        for i in pages:
            window[i] = cached(i)
            if not window[i]:
                break
        else:
            break
    else:
        length, window = shortest, {}
    if length == 0:
        return none, 0
    found |= window
    hit: tuple[list[Any], ...] = tuple(
        [null_block] * (length // spec.block_size) for _ in range(groups)
    )
    for i, each in found.items():
        for of_group, block in zip(hit, each, strict=True):
            of_group[i] = block
    return hit, length


def install() -> None:
    """Tells vLLM who manages window pages; its own kinds come first, or they would be missing."""
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(WindowSpec, WindowBlocks, uniform_type_base_spec=WindowSpec)
