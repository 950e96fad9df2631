"""One layer's packed cache in pools on a device, written and read by the kernels.

B sequences, S new tokens, T cached tokens, R latent channels, E rope channels (interleaved), J
pages of a sequence. Lengths and page numbers are kept on the host too, so that a step of generation
waits for nothing, and tables on the device change only where a page begins or ends. bf16 rows lie
in a few window pages a sequence, taken in turns; sequences may share packed pages, which never
change.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantmla.cache.view import CacheView
from quantmla.errors import UsageError, require
from quantmla.kernels.api import append, decode, gather
from quantmla.kernels.problem import DecodeQuery, Rows, Tokens
from quantmla.mla.partial import Partial
from quantmla.quant.format import CacheFormat
from quantmla.quant.layout import page_layout

FIRST_PAGES = 16  # of a new pool
GROWTH = 1.5
SPARE_WINDOW_PAGES = 3  # beside whole recent windows: one in parts, one that fills, one for `crop`
NOWHERE = -1


class PagePool:
    """Appends bf16 rows, attends to all tokens and reads them back, as `PagedCache` in torch."""

    def __init__(
        self,
        fmt: CacheFormat,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        batch: int,
        device: torch.device,
        backend: str = "auto",
    ):
        assert fmt.recent_window is not None, "an unprotected format has no kernels"
        self.fmt, self.kv_lora_rank, self.qk_rope_head_dim = fmt, kv_lora_rank, qk_rope_head_dim
        self.device, self.backend = device, backend
        self.width = fmt.recent_window // fmt.page_size + SPARE_WINDOW_PAGES
        self.lengths = [0] * batch
        self.tables: list[list[int]] = [[] for _ in range(batch)]
        self.intact = [0] * batch  # the first page whose bf16 rows are not written over
        self.pages_JY = self._new_pages(FIRST_PAGES)
        self.free = list(range(FIRST_PAGES))
        self.window_pages_JMC = self._new_window(batch)
        self._rebuild_tables()

    def _new_pages(self, count: int) -> Tensor:
        layout = page_layout(self.kv_lora_rank, self.qk_rope_head_dim, self.fmt)
        return torch.empty(count, layout.page_bytes, dtype=torch.uint8, device=self.device)

    def _new_window(self, batch: int) -> Tensor:
        """Each sequence's window pages, then each one's sink page."""
        shape = (batch * (self.width + 1), self.fmt.page_size)
        channels = self.kv_lora_rank + self.qk_rope_head_dim
        return torch.empty(*shape, channels, dtype=torch.bfloat16, device=self.device)

    def _ints(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _window_page(self, b: int, number: int) -> int:
        return b * self.width + number % self.width

    def _last_page(self, b: int) -> int:
        return (self.lengths[b] - 1) // self.fmt.page_size

    def _rebuild_tables(self) -> None:
        """Tables on the device, and free pages, from what the host knows."""
        batch = len(self.lengths)
        columns = max((self._last_page(b) + 1 for b in range(batch)), default=0) + FIRST_PAGES
        blocks, windows = ([[NOWHERE] * columns for _ in range(batch)] for _ in range(2))
        for b, table in enumerate(self.tables):
            blocks[b][: len(table)] = table
            last = self._last_page(b)
            for number in range(max(self.intact[b], last - self.width + 1), last + 1):
                windows[b][number] = self._window_page(b, number)
        self.block_table_BJ = self._ints(blocks).view(batch, columns)
        self.window_table_BJ = self._ints(windows).view(batch, columns)
        self.lengths_B, self.every_B = self._ints(self.lengths), self._ints(range(batch))
        self.sink_pages_B = self.every_B + batch * self.width
        used = {page for table in self.tables for page in table}
        self.free = [page for page in range(len(self.pages_JY)) if page not in used]

    def view(self) -> CacheView:
        return CacheView(
            fmt=self.fmt,
            kv_lora_rank=self.kv_lora_rank,
            pages_JY=self.pages_JY,
            block_table_BJ=self.block_table_BJ,
            lengths_B=self.lengths_B,
            window_pages_JMC=self.window_pages_JMC,
            window_table_BW=self.window_table_BJ,
            sink_pages_B=self.sink_pages_B,
        )

    def append(
        self, latent_BSR: Tensor, k_rope_BSE: Tensor, counts: Sequence[int] | None = None
    ) -> None:
        """Adds to every sequence its last `counts[b]` rows of the chunk, by default all S."""
        batch, size = latent_BSR.shape[:2]
        require(
            batch == len(self.lengths) == k_rope_BSE.shape[0],
            f"a batch of {batch} cannot be appended to a cache of {len(self.lengths)} sequences",
            UsageError,
        )
        counts = [size] * batch if counts is None else list(counts)
        rows = Rows(latent_BSR.flatten(0, 1), k_rope_BSE.flatten(0, 1))
        heads = [self._head(length, n) for length, n in zip(self.lengths, counts, strict=True)]
        first = [size - n for n in counts]
        if any(heads):
            self._append(rows, first, heads)
            first = [f + head for f, head in zip(first, heads, strict=True)]
            counts = [n - head for n, head in zip(counts, heads, strict=True)]
        self._append(rows, first, counts)

    def _head(self, length: int, count: int) -> int:
        """Rows to append first: those that end a page whose window page the others would take."""
        size = self.fmt.page_size
        begun = -length % size
        return begun if begun and (length + count - 1) // size - length // size >= self.width else 0

    def _append(self, rows: Rows, first: Sequence[int], counts: Sequence[int]) -> None:
        """Sequence b's new tokens are the rows first[b], first[b] + 1, ... of its chunk."""
        batch = len(counts)
        size = rows.latent_TR.shape[0] // batch
        if size == 1 and all(counts):
            tokens = Tokens(self.every_B, self.lengths_B.clone())
            self.lengths_B += 1
        else:
            first_B, added_B = self._ints(first), self._ints(counts)
            offset_BS = torch.arange(size, dtype=torch.int32, device=self.device) - first_B[:, None]
            new_BS = (offset_BS >= 0) & (offset_BS < added_B[:, None])
            sequence_BS = torch.where(new_BS, self.every_B[:, None], NOWHERE)
            position_BS = self.lengths_B[:, None] + offset_BS
            tokens = Tokens(sequence_BS.flatten(), position_BS.flatten())
            self.lengths_B += added_B
        for b, count in enumerate(counts):
            self.lengths[b] += count
        self._extend_tables(counts)
        append(rows, tokens, self.view(), backend=self.backend)

    def _extend_tables(self, counts: Sequence[int]) -> None:
        """Page numbers for pages that these tokens end, and window pages for those they begin."""
        size = self.fmt.page_size
        ended: list[tuple[int, int, int]] = []
        placed: list[tuple[int, int, int]] = []
        for b, count in enumerate(counts):
            length, table = self.lengths[b], self.tables[b]
            before, last = -(-(length - count) // size) - 1, self._last_page(b)
            self._reserve(length // size - len(table))
            while len(table) < length // size:
                ended.append((b, len(table), self.free[-1]))
                table.append(self.free.pop())
            keep = last - self.width + 1
            self.intact[b] = max(self.intact[b], keep)
            if last > before:
                lost = range(max(0, before - self.width + 1), min(before + 1, keep))
                placed += [(b, number, NOWHERE) for number in lost]
                begun = range(max(before + 1, keep), last + 1)
                placed += [(b, number, self._window_page(b, number)) for number in begun]
        most = max(self._last_page(b) for b in range(len(counts))) + 1
        if most > self.block_table_BJ.shape[1]:
            self._widen(int(GROWTH * most))
        for table_BJ, entries in ((self.block_table_BJ, ended), (self.window_table_BJ, placed)):
            if entries:
                b_n, number_n, page_n = self._ints(entries).T
                table_BJ[b_n.long(), number_n.long()] = page_n

    def _reserve(self, count: int) -> None:
        missing, held = count - len(self.free), len(self.pages_JY)
        if missing > 0:
            more = max(missing, int(held * (GROWTH - 1)))
            pages = self._new_pages(held + more)
            pages[:held] = self.pages_JY
            self.pages_JY = pages
            self.free += range(held, held + more)

    def _widen(self, columns: int) -> None:
        more = (0, columns - self.block_table_BJ.shape[1])
        self.block_table_BJ = torch.nn.functional.pad(self.block_table_BJ, more, value=NOWHERE)
        self.window_table_BJ = torch.nn.functional.pad(self.window_table_BJ, more, value=NOWHERE)

    def decode(self, query: DecodeQuery) -> Partial:
        """Attention of the last S tokens, which are appended already, over all tokens."""
        return decode(query, self.view(), backend=self.backend)

    def read(self) -> tuple[Tensor, Tensor]:
        """Latents [B, T, R] and rope keys [B, T, E] as decode sees them, bf16, T the longest.

        Shorter sequences have zeros before their first token.
        """
        batch, longest = len(self.lengths), max(self.lengths, default=0)
        channels = self.kv_lora_rank + self.qk_rope_head_dim
        out = torch.zeros(batch * longest, channels, dtype=torch.bfloat16, device=self.device)
        token = torch.arange(longest, dtype=torch.int32, device=self.device)
        position_BT = token - (longest - self.lengths_B[:, None])
        sequence_BT = torch.where(position_BT >= 0, self.every_B[:, None], NOWHERE)
        tokens = Tokens(sequence_BT.flatten(), position_BT.flatten())
        gather(tokens, self.view(), out, backend=self.backend)
        rows = out.view(batch, longest, channels)
        return rows[..., : self.kv_lora_rank], rows[..., self.kv_lora_rank :]

    def pages(self, b: int) -> Tensor:
        """Bytes of sequence b's complete pages, uint8 [J, Y]; the last are not read yet."""
        return self.pages_JY[self._ints(self.tables[b]).long()]

    def crop(self, tokens: int) -> None:
        """Takes the last `tokens` off every sequence, if the bf16 rows it then needs are left."""
        size = self.fmt.page_size
        lengths = [max(0, length - tokens) for length in self.lengths]
        for b, length in enumerate(lengths):
            first = self.fmt.first_recent(length)
            require(
                first >= length or first // size >= self.intact[b],
                f"cropping {self.lengths[b]} tokens to {length} needs bf16 rows from token {first} "
                f"on, and those before {self.intact[b] * size} are gone: the kernels' window keeps "
                f"{self.width} pages of {size}",
                UsageError,
            )
        self.lengths = lengths
        self.tables = [t[: n // size] for t, n in zip(self.tables, lengths, strict=True)]
        self._rebuild_tables()

    def select(self, indices: Sequence[int]) -> None:
        """Sequence i becomes what sequence indices[i] was; packed pages are shared."""
        batch, chosen = len(self.lengths), self._ints(indices).long()
        pages = self.window_pages_JMC
        window, sinks = pages.split((batch * self.width, batch))
        window = window.unflatten(0, (batch, self.width))[chosen].flatten(0, 1)
        self.window_pages_JMC = torch.cat((window, sinks[chosen]))
        self.lengths = [self.lengths[i] for i in indices]
        self.tables = [list(self.tables[i]) for i in indices]
        self.intact = [self.intact[i] for i in indices]
        self._rebuild_tables()

    def clear(self) -> None:
        """Forgets every token; the pools stay."""
        self.lengths = [0] * len(self.lengths)
        self.tables = [[] for _ in self.lengths]
        self.intact = [0] * len(self.lengths)
        self._rebuild_tables()

    def allocated_bytes(self) -> int:
        """Memory of the pools, pages that are not in use yet included."""
        return self.pages_JY.nbytes + self.window_pages_JMC.nbytes
