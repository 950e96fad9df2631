"""The one result that the calls of a mixed step write to, and what is alive beside it.

Six sequences with a cache; their query lengths are made up, and so is what calls they come in.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quantmla.kernels import api
from quantmla.mla.partial import Partial
from quantmla.serve.vllm.plans import StepPlans
from quantmla.serve.vllm.step import Call, plan_calls

PIECE = 64
# Query lengths, the longest of a decode, and how many queries a call of short chunks may have.
IN_ORDER = (1, 1, 1, 1, 1, 23), 1, 64
PADDED = (1, 3, 2, 4, 1, 3), 4, 64
OUT_OF_ORDER = (1, 20, 1, 20, 1, 20), 1, 64
BOTH = (1, 20, 1, 1, 10, 1), 1, 64
PIECES = (150, 1, 64, 70, 1, 9), 1, 200
STEPS = {
    "in_order": IN_ORDER,
    "padded": PADDED,
    "out_of_order": OUT_OF_ORDER,
    "both": BOTH,
    "pieces": PIECES,
}


class Mixed:
    """A layer, a step of it whose calls are `plan_calls`'s, and queries of every row."""

    def __init__(self, engine, lengths: tuple[int, ...], decode_length: int, most: int) -> None:
        from vllm_harness import NAME, RANK, ROPE

        self.engine = e = engine(chunk=2048)
        generator = torch.Generator().manual_seed(7)
        for i in range(6):
            tokens = torch.randint(512, (200 + 37 * i,), generator=generator)
            e.pool.add(f"{i}", tokens.tolist(), 3)
        e.step()
        e.step()
        packed, window = e.steps[-1][0]
        assert packed.num_decodes == 8  # two are padding, as for a graph
        self.rows, self.lengths = sum(lengths), lengths
        self.bounds = torch.tensor((0, *lengths)).cumsum(0, dtype=torch.int32)
        self.packed = replace(
            packed,
            num_decodes=6,
            num_decode_tokens=self.rows,
            calls=plan_calls(self.bounds, decode_length, most, PIECE),
            plans=StepPlans(),
        )
        self.metadata = {NAME: self.packed, e.window.prefix: window}
        draw = torch.randn(self.rows, 2, RANK + ROPE, generator=generator)
        self.q = draw[..., :RANK], draw[..., RANK:]

    def context(self):
        from vllm.forward_context import ForwardContext, override_forward_context

        return override_forward_context(
            ForwardContext(no_compile_layers={}, attn_metadata=self.metadata, slot_mapping={})
        )

    def forward(self) -> Tensor:
        layer = self.engine.layer
        with self.context():
            out, lse = layer.impl.forward_mqa(self.q, layer.kv_cache, self.packed, layer)
        assert lse is None
        return out

    def alone(self, number: int, call: Call) -> Tensor:
        """What one call gives in a tensor of its own."""
        impl = self.engine.layer.impl
        with self.context():
            return impl._decode(self.q, self.engine.layer.kv_cache, impl._step(), number, call)

    def pieces(self) -> list[Call]:
        """Every sequence's rows in calls of their own."""
        found = []
        for b, length in enumerate(self.lengths):
            first, end = self.bounds[b : b + 2].tolist()
            for start in range(first, end, PIECE):
                stop = min(start + PIECE, end)
                after = torch.tensor([first + length - stop], dtype=torch.int32)
                found.append(Call(slice(b, b + 1), slice(start, stop), 1, after))
        return found


@pytest.fixture(params=STEPS.values(), ids=STEPS)
def mixed(engine, request):
    return Mixed(engine, *request.param)


def test_the_steps_are_what_they_are_called(engine):
    def ways(name):
        calls = Mixed(engine, *STEPS[name]).packed.calls
        return {"there" if c.places is None else "padded" if c.places is not c.rows else "moved"
                for c in calls}  # fmt: skip

    assert ways("in_order") == {"there"}
    assert ways("padded") == {"padded"}
    assert ways("out_of_order") == {"moved"}
    assert ways("both") == {"moved", "padded"}
    assert ways("pieces") >= {"there", "padded"}


def test_a_mixed_result_has_the_bits_of_its_calls(mixed):
    """A row that is made up comes before the sequence's own one, whose number it has."""
    out = mixed.forward()
    assert out.shape == (mixed.rows, 2, mixed.q[0].shape[-1])
    assert out.is_contiguous()
    wanted = torch.full_like(out, torch.nan)
    rows = torch.arange(mixed.rows)
    for number, call in enumerate(mixed.packed.calls):
        for row, part in zip(rows[call.rows], mixed.alone(number, call), strict=True):
            wanted[row] = part
    assert torch.equal(out, wanted)


def test_a_mixed_result_is_that_of_single_sequences(mixed):
    out = mixed.forward()
    for i, call in enumerate(mixed.pieces()):
        torch.testing.assert_close(out[call.rows], mixed.alone(100 + i, call))


class Live(TorchDispatchMode):
    """Most bytes of floating-point tensors alive at once, but for queries and copies of them."""

    def __init__(self, queries: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.queries = {StorageWeakRef(x.untyped_storage()) for x in queries}
        self.found: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = func(*args, **(kwargs or {}))
        for x in tree_leaves(given):
            if isinstance(x, Tensor) and x.is_floating_point():
                storage = x.untyped_storage()
                ref = StorageWeakRef(storage)
                if func is torch.ops.aten.index.Tensor and self._is_query(args[0]):
                    self.queries.add(ref)
                if ref not in self.queries:
                    self.found[ref] = storage.nbytes()
        alive = sum(size for ref, size in self.found.items() if not ref.expired())
        self.peak = max(self.peak, alive)
        return given

    def _is_query(self, x: Tensor) -> bool:
        return StorageWeakRef(x.untyped_storage()) in self.queries


def echo(query: api.DecodeQuery, _: Tensor, __: Tensor, out: Tensor | None = None) -> Partial:
    """A backend that allocates its output and nothing else, and gives the queries back."""
    if out is None:
        out = torch.empty(query.latent_BSNR.shape)
    return Partial(out.copy_(query.latent_BSNR), query.latent_BSNR[..., 0])


def test_beside_the_result_one_calls_output_is_alive(mixed, monkeypatch):
    plan = SimpleNamespace(takes=lambda *_: True, launch=echo)
    monkeypatch.setattr(api, "plan_decode", lambda *_: plan)
    with Live(mixed.q) as live:
        out = mixed.forward()
    assert torch.equal(out, mixed.q[0])
    moved = [len(call.places) for call in mixed.packed.calls if call.places is not None]
    row = out[0].numel() * out.element_size()
    assert live.peak == (mixed.rows + 1 + max(moved, default=0)) * row
