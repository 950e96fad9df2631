"""Plans of a step: made once for all layers, never used for another step."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from quantmla.kernels import api
from quantmla.kernels.problem import Tokens
from quantmla.serve.vllm.plans import StepPlans

OPERATIONS = ("decode", "append", "gather")


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(512, (length,), generator=generator).tolist()


@pytest.fixture
def made(monkeypatch):
    """How many plans were made, by operation."""
    count = dict.fromkeys(OPERATIONS, 0)
    for name in OPERATIONS:
        plain = getattr(api, f"plan_{name}")

        def counted(*args, name=name, plain=plain, **more):
            count[name] += 1
            return plain(*args, **more)

        monkeypatch.setattr(api, f"plan_{name}", counted)
    return count


def mixed(engine):
    """Four steps; the third has decodes, short chunks and a long one that continues."""
    e = engine(chunk=600, long_prefill_token_threshold=200)
    for i, length in enumerate((220, 600, 400)):
        e.pool.add(f"{i}", prompt(length, i), 3)
    return e


def layer_again(e, heads: int = 2):
    """The last step's calls of one more layer, whose pool is another; what they give."""
    from vllm.forward_context import ForwardContext, override_forward_context
    from vllm_harness import NAME, RANK, ROPE

    packed, window = e.steps[-1][0]
    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    count = packed.num_actual_tokens
    context = ForwardContext(
        no_compile_layers={},
        attn_metadata={NAME: packed, e.window.prefix: window},
        slot_mapping={},
    )
    raw, pool = e.raw.clone(), e.layer.kv_cache
    impl, kept = e.layer.impl, e.window.kv_cache
    cache = raw.view(torch.uint8).as_strided(pool.shape, pool.stride())
    e.window.kv_cache = raw.view(torch.bfloat16).as_strided(kept.shape, kept.stride())
    query = draw(count, heads, RANK + ROPE).split((RANK, ROPE), dim=-1)
    with override_forward_context(context):
        latent, k_rope = draw(count, RANK).bfloat16(), draw(count, 1, ROPE).bfloat16()
        impl.do_kv_cache_update(latent, k_rope, cache, torch.empty(0), "auto", torch.ones(1))
        out, _ = impl.forward_mqa(
            tuple(x[: packed.num_decode_tokens] for x in query), cache, packed, e.layer
        )
    e.window.kv_cache = kept
    return out


def test_layers_share_plans_and_heads_do_not(engine, made):
    e = mixed(engine)
    for _ in range(2):
        e.step()
    assert made["gather"]
    calls = len(e.steps[-1][0][0].calls)
    chunks = len(e.steps[-1][0][0].context)
    assert chunks
    made.update(dict.fromkeys(OPERATIONS, 0))
    out = layer_again(e)  # whose queries and rows have other strides than the engine's
    assert made == {"decode": calls, "append": 1, "gather": 0}
    assert torch.equal(layer_again(e), out)
    assert made == {"decode": calls, "append": 1, "gather": 0}
    layer_again(e, heads=4)
    assert torch.equal(layer_again(e), out)
    assert made == {"decode": 2 * calls, "append": 1, "gather": 0}
    e.steps[-1][0][0].plans = StepPlans()
    assert torch.equal(layer_again(e), out)
    assert made == {"decode": 3 * calls, "append": 2, "gather": 0}


def test_every_step_plans_anew(engine, made):
    e = mixed(engine)
    made.update(dict.fromkeys(OPERATIONS, 0))  # some were made at start
    e.run()
    packed = [metadata[0] for metadata, _ in e.steps]
    decodes = sum(len(m.calls) if m.calls else m.num_decodes > 0 for m in packed)
    chunks = sum(len(m.context) for m in packed)
    assert made == {"decode": decodes, "append": len(packed), "gather": chunks}
    assert len({id(m.plans) for m in packed}) == len(packed)


def carry_over(e, monkeypatch):
    """The metadata of every step gets the plans of the one before."""
    builder, plans = e.builders[0], StepPlans()
    plain = builder.build

    def build(*args, **more):
        metadata = plain(*args, **more)
        metadata.plans = plans
        return metadata

    monkeypatch.setattr(builder, "build", build)


def decoding(engine):
    e = engine(chunk=256)
    e.pool.add("a", prompt(200), 20)
    return e


def test_plans_of_another_step_are_not_used(engine, monkeypatch):
    """Outputs and pages are checked in every step."""
    e = decoding(engine)
    carry_over(e, monkeypatch)
    e.run()
    assert e.decoded == 19


def test_plans_of_another_step_would_be_noticed(engine, monkeypatch):
    """Not in decodes: what they read lies where it did, or no CUDA graph could be of them."""
    e = engine(chunk=256)
    e.builders[0].chunked_prefill_workspace_size = 256
    e.pool.add("a", prompt(800), 2)
    carry_over(e, monkeypatch)
    plain = StepPlans.find
    monkeypatch.setattr(
        StepPlans, "find", lambda self, step, *rest: plain(self, ("any step",), *rest)
    )
    with pytest.raises(AssertionError):
        e.run()


def test_a_copy_with_other_tables_plans_anew(engine, made):
    e = decoding(engine)
    for _ in range(3):
        e.step()
    out = layer_again(e)
    (packed, window), tokens = step = e.steps[-1]
    copies = (
        (replace(packed, block_table=packed.block_table.roll(1, 1)), window),
        (replace(packed, lengths=packed.lengths - 70), window),
        (replace(packed, tokens=Tokens(*(x.roll(1) for x in packed.tokens))), window),
        (packed, replace(window, table=window.table.roll(1, 1))),
    )
    for copy in copies:
        e.steps.append((copy, tokens))
        made.update(dict.fromkeys(OPERATIONS, 0))
        assert not torch.equal(layer_again(e), out) or copy[0].tokens is not packed.tokens
        assert (made["decode"], made["append"]) == (1, 1)
        e.steps.append(step)
        assert torch.equal(layer_again(e), out)


def test_a_plan_is_found_by_its_key_its_step_and_what_it_takes():
    plans, step = StepPlans(), (object(), object())

    def find(step, key, value):
        return plans.find(step, key, (value,), lambda: SimpleNamespace(takes=lambda x: x == value))

    first = find(step, "a", 1)
    assert find(step, "a", 1) is first
    assert find(tuple(step), "a", 1) is first
    other = find(step, "a", 2)
    assert other is not first
    assert find(step, "b", 1) is not first
    assert find(step, "a", 1) is first
    assert find(step, "a", 2) is other
    assert find((step[0], object()), "a", 1) is not first
    assert find(step, "a", 1) is not first
