"""Native generation beside the torch cache: the same tokens, and no bf16 copy of the cache."""

import pytest
import tiny
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

from quantmla.errors import UnsupportedModel, UsageError
from quantmla.quant.format import parse_format
from quantmla.serve.native import NativeLayer, native_cache
from quantmla.serve.pool import PagePool
from quantmla.serve.transformers import QuantMLACache

SMALL = {"group_size": 16, "page_size": 16}
FMT = parse_format("c4r4", **SMALL, recent_window=32)
GREEDY = {"do_sample": False, "pad_token_id": 0}
PROMPT, PAD = 60, 13
# Models are float64: both compute from the same bytes in another order. In float32 that would tip
# the rounding of a later layer's rows to bf16. Norms and routers compute in float32 even so.
ATOL = 1e-4


@pytest.fixture
def batch():
    ids = torch.randint(2, 64, (2, PROMPT), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :PAD] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.fixture
def unread(monkeypatch):
    """How often the whole cache was read to bf16."""
    calls = []
    read = PagePool.read
    monkeypatch.setattr(PagePool, "read", lambda pool: (calls.append(1), read(pool))[1])
    return calls


def test_a_left_padded_batch_generates_the_same_tokens_without_a_copy(model, batch, unread):
    plain = model.generate(
        **batch,
        past_key_values=QuantMLACache(model.config, FMT, batch["attention_mask"]),
        max_new_tokens=60,
        **GREEDY,
    )
    cache = native_cache(model, FMT, batch["attention_mask"], backend="reference")
    native = model.generate(**batch, past_key_values=cache, max_new_tokens=60, **GREEDY)
    assert torch.equal(native, plain)
    assert cache.layers[0].paged.lengths == [PROMPT + 59, PROMPT + 59 - PAD]
    assert not unread


def test_a_mask_of_another_prompt_is_refused(model, batch):
    cache = native_cache(model, FMT, batch["attention_mask"][:, 9:], backend="reference")
    with pytest.raises(UsageError, match="attention_mask has 51 columns, the prompt 60 tokens"):
        model.generate(**batch, past_key_values=cache, max_new_tokens=2, **GREEDY)


def logits(model, ids, cache, turns):
    found, at = [], 0
    with torch.inference_mode():
        for size in turns:
            turn = ids[:, at : at + size]
            found.append(model(turn, past_key_values=cache, use_cache=True).logits)
            at += size
    return torch.cat(found, dim=1)


def test_logits_are_those_of_the_torch_cache(model, batch):
    """Steps of one token, and of several while no page leaves the recent window."""
    model = model.double()
    ids, turns = batch["input_ids"][:1], [40, 1, 1, 3, 1, 1, 1, 8, 4]
    want = logits(model, ids, QuantMLACache(model.config, FMT), turns)
    got = logits(model, ids, native_cache(model, FMT, backend="reference"), turns)
    assert torch.allclose(got, want, atol=ATOL)
    exact = logits(model, ids, DynamicCache(config=model.config), turns)
    assert (exact - want)[:, 48:].abs().max() > 10 * ATOL, "the comparison sees quantisation"


def test_a_later_chunk_reads_the_past_once(model, batch, unread):
    """bf16, as the engine's own chunked prefill: rounding is all that differs."""
    ids, turns = batch["input_ids"][:1], [40, 20]
    want = logits(model, ids, QuantMLACache(model.config, FMT), turns)
    got = logits(model, ids, native_cache(model, FMT, backend="reference"), turns)
    assert len(unread) == 2  # once a layer
    exact = logits(model, ids, DynamicCache(config=model.config), turns)
    assert (got - want).abs().max() < (exact - want).abs().max() / 4


def test_beam_search(model, batch):
    settings = dict(max_new_tokens=30, num_beams=3, **GREEDY)
    mask = batch["attention_mask"]
    want = model.generate(
        **batch, past_key_values=QuantMLACache(model.config, FMT, mask), **settings
    )
    cache = native_cache(model, FMT, mask, backend="reference")
    assert torch.equal(model.generate(**batch, past_key_values=cache, **settings), want)


def test_assisted_generation_agrees_with_plain(model, drafter, batch):
    """Drafts are verified in one step and taken back by crop."""
    ids, settings = batch["input_ids"][:1], dict(max_new_tokens=50, **GREEDY)
    plain = model.generate(
        ids, past_key_values=native_cache(model, FMT, backend="reference"), **settings
    )
    assisted = native_cache(model, FMT, backend="reference")
    got = model.generate(ids, past_key_values=assisted, assistant_model=drafter, **settings)
    assert torch.equal(got, plain)
    assert assisted.get_seq_length() >= PROMPT + 49


@pytest.mark.parametrize("case", tiny.CASES)
def test_every_familys_keys_are_absorbed(case, tiny_checkpoint):
    """Rope orders, latent multipliers, scaled queries and unrotated keys included."""
    model = tiny.load(tiny_checkpoint(case)).double()
    model.set_experts_implementation("eager")  # the grouped products know no float64
    fmt = parse_format("c4r4", group_size=16, page_size=8, recent_window=16)
    ids, turns = tiny.random_tokens(length=44)[:1], [32] + [1] * 12
    want = logits(model, ids, QuantMLACache(model.config, fmt), turns)
    exact = logits(model, ids, DynamicCache(config=model.config), turns)
    got = logits(model, ids, native_cache(model, fmt, backend="reference"), turns)
    assert (got - want).abs().max() < ATOL < (exact - want).abs().max() / 10


def test_other_caches_of_the_same_model_work_as_before(model, batch):
    settings = dict(max_new_tokens=20, **GREEDY)
    want = model.generate(**batch, **settings)
    native_cache(model, FMT, backend="reference")
    assert torch.equal(model.generate(**batch, **settings), want)


def test_a_model_that_does_not_attend_to_it_is_told(model, batch):
    cache = native_cache(model, FMT, backend="reference")
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        model(batch["input_ids"][:1], past_key_values=cache, use_cache=True)
        with pytest.raises(UsageError, match="the model's attention implementation is not"):
            model(batch["input_ids"][:1, :1], past_key_values=cache, use_cache=True)


def test_a_backend_that_cannot_says_why_before_the_model_is_touched(model):
    with pytest.raises(UsageError, match="'triton' cannot decode: Triton kernels need a GPU"):
        native_cache(model, FMT, backend="triton")
    with pytest.raises(UsageError, match="evaluation only"):
        native_cache(model, FMT.unprotected(), backend="reference")
    for wrong in ("out/c4r4", model.config):
        with pytest.raises(UsageError, match="give a loaded model of transformers"):
            native_cache(wrong, FMT)
    assert model.config._attn_implementation == "sdpa"
    native_cache(model, FMT, backend="auto")  # on a CPU: the reference


def test_the_format_and_skipped_layers_come_from_a_fused_config(model):
    model.config.quantmla_config = {"version": 1, "format": FMT.to_json(), "ignored_layers": [1]}
    cache = native_cache(model)
    assert isinstance(cache.layers[0], NativeLayer)
    assert not isinstance(cache.layers[1], NativeLayer)
    ids = torch.arange(2, 30)[None]
    out = model.generate(ids, past_key_values=cache, max_new_tokens=5, **GREEDY)
    assert out.shape == (1, 33)


def test_a_quantized_key_projection_is_refused(model, batch):
    class Other(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    attention = model.model.layers[0].self_attn
    attention.kv_b_proj = Other(attention.kv_b_proj)
    cache = native_cache(model, FMT, backend="reference")
    with pytest.raises(UnsupportedModel, match=r"kv_b_proj is Other"):
        model.generate(batch["input_ids"][:1], past_key_values=cache, max_new_tokens=3, **GREEDY)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "triton", "cuda"])
def test_on_a_gpu_the_kernels_generate(backend):
    """512 + 64 channels in bf16: logits as near to the torch cache's as rounding is."""
    torch.manual_seed(0)
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    settings = tiny.LATENT | tiny.CASES["deepseek_v3"][2] | sizes
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**settings)).eval()
    with torch.no_grad():
        tiny.randomize(model, tiny.generator(0))
    model = model.to("cuda", torch.bfloat16)
    fmt = parse_format("c4r4")
    ids = torch.randint(2, 256, (2, 300), device="cuda")
    turns = [230] + [1] * 70
    want = logits(model, ids, QuantMLACache(model.config, fmt), turns)
    try:
        cache = native_cache(model, fmt, backend=backend)
    except UsageError as error:
        pytest.skip(str(error))
    got = logits(model, ids, cache, turns)
    exact = logits(model.float(), ids, QuantMLACache(model.config, fmt), turns)
    rounding = (want.double() - exact).norm()
    print(
        backend, float(rounding / exact.norm()), float((got.double() - exact).norm() / exact.norm())
    )
    assert (got.double() - exact).norm() <= 2 * rounding
