import pytest
import torch
from transformers import DynamicCache, LlamaConfig
from transformers.cache_utils import DynamicLayer

from quantmla.errors import UnsupportedModel, UsageError
from quantmla.quant.format import paper_format, parse_format
from quantmla.quant.layout import bf16_row_bytes, page_layout
from quantmla.quant.mixed import MixedFormat
from quantmla.serve.transformers import QuantMLACache, QuantMLALayer

SMALL = {"group_size": 16, "page_size": 16}
FMT = parse_format("c4r4", **SMALL, recent_window=32)
EXACT = parse_format("c16r16", **SMALL, recent_window=32)
GREEDY = {"do_sample": False, "pad_token_id": 0}
PROMPT, PAD = 60, 13


@pytest.fixture
def batch():
    ids = torch.randint(2, 64, (2, PROMPT), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :PAD] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def pages(cache: QuantMLACache, row: int) -> list[torch.Tensor]:
    return [layer.paged.pages(row) for layer in cache.layers]


def test_a_left_padded_row_generates_what_it_generates_alone(model, batch):
    cache = QuantMLACache(model.config, FMT, batch["attention_mask"])
    both = model.generate(**batch, past_key_values=cache, max_new_tokens=40, **GREEDY)
    alone_cache = QuantMLACache(model.config, FMT)
    alone = model.generate(
        batch["input_ids"][1:, PAD:], past_key_values=alone_cache, max_new_tokens=40, **GREEDY
    )
    assert torch.equal(both[1, PROMPT:], alone[0, PROMPT - PAD :])
    assert cache.layers[0].paged.lengths == [PROMPT + 39, PROMPT + 39 - PAD]
    # sinks are each row's first real tokens
    assert torch.equal(
        cache.layers[0].paged.sequences[1].sink_latent_TR,
        alone_cache.layers[0].paged.sequences[0].sink_latent_TR,
    )


def test_a_left_padded_batch_without_its_mask_is_refused():
    layer = QuantMLALayer(FMT, "half")
    states = torch.zeros(2, 1, 5, 32), torch.zeros(2, 1, 5, 16)
    with pytest.raises(UsageError, match="left-padded"):
        layer.update(
            *states, kwargs={"position_ids": torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])}
        )
    layer.update(*states, kwargs={"position_ids": torch.arange(5)[None]})


@pytest.mark.parametrize("beams", [1, 3])
def test_sixteen_bits_generate_what_the_stock_cache_generates(model, batch, beams):
    half = model.to(torch.bfloat16)
    settings = dict(max_new_tokens=40, num_beams=beams, **GREEDY)
    ours = half.generate(
        **batch,
        past_key_values=QuantMLACache(half.config, EXACT, batch["attention_mask"]),
        **settings,
    )
    assert torch.equal(ours, half.generate(**batch, **settings))


def test_several_turns_over_one_cache(model, batch):
    half, ids = model.to(torch.bfloat16), batch["input_ids"][:1]
    ours, stock = QuantMLACache(half.config, EXACT), DynamicCache(config=half.config)
    with torch.inference_mode():
        for turn in (ids[:, :20], ids[:, 20:21], ids[:, 21:50], ids[:, 50:51], ids[:, 51:]):
            got = half(turn, past_key_values=ours, use_cache=True).logits
            want = half(turn, past_key_values=stock, use_cache=True).logits
            assert torch.equal(got, want)
    assert ours.get_seq_length() == stock.get_seq_length() == PROMPT
    assert ours.get_mask_sizes(3, 0) == stock.get_mask_sizes(3, 0)


def test_a_chunk_sees_itself_in_bf16_and_the_past_as_decode_does():
    layer = QuantMLALayer(FMT, "half")
    g = torch.Generator().manual_seed(0)
    latent = torch.randn(1, 1, 100, 32, generator=g)
    k_rope = torch.randn(1, 1, 100, 16, generator=g)
    layer.update(latent[:, :, :70], k_rope[:, :, :70])
    decoded = layer._read(torch.float32)
    got = layer.update(latent[:, :, 70:], k_rope[:, :, 70:])
    for x, past, new in zip(got, decoded, (latent, k_rope), strict=True):
        assert x.dtype == torch.float32
        assert torch.equal(x[:, :, :70], past)
        assert torch.equal(x[:, :, 70:], new[:, :, 70:].bfloat16().float())
    assert (decoded[0][:, :, 4:32] != latent[:, :, 4:32].bfloat16().float()).any()


def test_a_short_step_may_read_what_decode_reads():
    """All that is cached after it, so that a page that it ripens is read packed already."""
    layer = QuantMLALayer(FMT, "half")
    layer.decode_tokens = 10
    g = torch.Generator().manual_seed(0)
    latent = torch.randn(1, 1, 90, 32, generator=g)
    k_rope = torch.randn(1, 1, 90, 16, generator=g)
    layer.update(latent[:, :, :75], k_rope[:, :, :75])
    before = layer._read(torch.float32)
    got = layer.update(latent[:, :, 75:85], k_rope[:, :, 75:85])
    assert all(torch.equal(x, y) for x, y in zip(got, layer._read(torch.float32), strict=True))
    assert (got[0][:, :, 32:48] != before[0][:, :, 32:48]).any(), "the page of 32 to 47 is packed"
    assert torch.equal(got[0][:, :, 48:75], before[0][:, :, 48:75])


def test_the_stored_rope_order_is_interleaved():
    states = torch.zeros(1, 1, 3, 32), torch.arange(16.0).expand(1, 1, 3, 16)
    for order, first in (("half", [0, 8, 1, 9]), ("interleaved", [0, 1, 2, 3])):
        layer = QuantMLALayer(FMT, order)
        _, out = layer.update(*states)
        assert torch.equal(out, states[1])
        assert layer.paged.sequences[0].k_rope_TE[0, :4].tolist() == first


def test_assisted_generation_leaves_the_cache_as_plain_generation_does(model, drafter, batch):
    half, ids = model.to(torch.bfloat16), batch["input_ids"][:1]
    settings = dict(max_new_tokens=60, **GREEDY)
    assisted, plain = QuantMLACache(half.config, EXACT), QuantMLACache(half.config, EXACT)
    got = half.generate(
        ids, past_key_values=assisted, assistant_model=drafter.to(torch.bfloat16), **settings
    )
    want = half.generate(ids, past_key_values=plain, **settings)
    assert torch.equal(got, want)
    assert assisted.get_seq_length() == plain.get_seq_length()
    for a, b in zip(pages(assisted, 0), pages(plain, 0), strict=True):
        assert a.shape == b.shape


def test_crop_in_both_spellings_and_with_a_tensor():
    for argument in (-5, 20, torch.tensor(-5)):
        layer = QuantMLALayer(FMT, "half")
        layer.update(torch.randn(1, 1, 25, 32), torch.randn(1, 1, 25, 16))
        layer.crop(argument)
        assert layer.get_seq_length() == 20
        assert layer.paged.lengths == [20]
    with pytest.raises(UsageError, match="cannot crop 30 of 20"):
        layer.crop(-30)


def test_batch_repeat_select_and_reorder():
    layer = QuantMLALayer(FMT, "half", padding=[0, 2])
    latent = torch.randn(2, 1, 6, 32)
    layer.update(latent, torch.randn(2, 1, 6, 16))
    layer.batch_repeat_interleave(2)
    assert layer.padding == [0, 0, 2, 2]
    layer.reorder_cache(torch.tensor([0, 2, 2, 3]))
    layer.batch_select_indices(torch.tensor([False, True, True, False]))
    assert layer.paged.lengths == [4, 4]
    assert layer.padding == [2, 2]
    layer.reset()
    assert layer.get_seq_length() == 0
    assert layer.paged.lengths == [0, 0]


def test_allocated_bytes_after_a_prompt(model, batch):
    cache = QuantMLACache(model.config, FMT)
    with torch.inference_mode():
        model(batch["input_ids"][:1], past_key_values=cache, use_cache=True)
    packed = (PROMPT - 32) // 16
    rows = PROMPT - 16 * packed + FMT.num_sink_tokens
    layer = packed * page_layout(32, 16, FMT).page_bytes + rows * bf16_row_bytes(32, 16)
    assert cache.allocated_bytes() == 2 * layer


def test_skipped_layers_keep_the_stock_cache(model, batch):
    cache = QuantMLACache(model.config, FMT, skip_layers=(0,))
    assert type(cache.layers[0]) is DynamicLayer
    model.generate(batch["input_ids"][:1], past_key_values=cache, max_new_tokens=3, **GREEDY)
    assert cache.layers[1].paged.lengths == [PROMPT + 2]
    with pytest.raises(UsageError, match=r"skip_layers \[2\]"):
        QuantMLACache(model.config, FMT, skip_layers=(0, 2))


def test_the_format_comes_from_the_config_of_a_fused_model(model):
    with pytest.raises(UsageError, match="no quantmla_config"):
        QuantMLACache.from_config(model.config)
    model.config.quantmla_config = {"version": 1, "format": FMT.to_json(), "ignored_layers": [1]}
    cache = QuantMLACache.from_config(model.config)
    assert cache.layers[0].fmt == FMT
    assert type(cache.layers[1]) is DynamicLayer
    model.config.quantmla_config = {"version": 2, "format": FMT.to_json()}
    with pytest.raises(UsageError, match="version 2 is not 1"):
        QuantMLACache.from_config(model.config)
    for change in ({"format": None}, {"format": {}}, {"ignored_layers": 5}):
        model.config.quantmla_config = {"version": 1, "format": FMT.to_json()} | change
        with pytest.raises(UsageError, match=r"cache format (is None|lacks)|ignored_layers .* 5"):
            QuantMLACache.from_config(model.config)


def test_what_cannot_be_served_is_refused(model, batch):
    with pytest.raises(UsageError, match="no byte layout"):
        QuantMLACache(model.config, paper_format("c4r4"))
    with pytest.raises(UnsupportedModel, match="no latent attention"):
        QuantMLACache(LlamaConfig(num_hidden_layers=1), FMT)
    with pytest.raises(UsageError, match="padding on the left only"):
        QuantMLACache(model.config, FMT, batch["attention_mask"].flip(1))
    cache = QuantMLACache(model.config, FMT)
    with pytest.raises(UsageError, match=r"torch\.float16"):
        model.half()(batch["input_ids"], past_key_values=cache, use_cache=True)
    with pytest.raises(UnsupportedModel, match="does not cache latents"):
        cache.update(torch.zeros(1, 2, 3, 24), torch.zeros(1, 2, 3, 8), 0)
    with pytest.raises(UsageError, match="do not divide"):
        QuantMLALayer(FMT, "half", [0, 1]).update(
            torch.zeros(3, 1, 2, 32), torch.zeros(3, 1, 2, 16)
        )
    with pytest.raises(UsageError, match="not offloaded"):
        cache.layers[0].offload()


@pytest.mark.parametrize("cut", [slice(0, 50), slice(10, None)])
def test_a_mask_shorter_than_its_prompt_is_refused(model, batch, cut):
    cache = QuantMLACache(model.config, FMT, batch["attention_mask"][:, cut])
    with pytest.raises(UsageError, match="attention_mask has 50 columns, the prompt 60 tokens"):
        model.generate(**batch, past_key_values=cache, max_new_tokens=2, **GREEDY)


@pytest.mark.parametrize("chunk", [None, 5, 25])
def test_a_mask_and_position_ids_that_differ_are_refused(model, batch, chunk):
    longer = torch.nn.functional.pad(batch["attention_mask"], (7, 0))
    shifted = batch["attention_mask"].roll(-3, 1)
    shifted[:, -3:] = 1
    settings = dict(max_new_tokens=2, prefill_chunk_size=chunk, **GREEDY)
    for mask, words in (
        (longer, "has (7|20) padding tokens in row [01], but by the position ids there are (0|13)"),
        (shifted, "has 10 padding tokens in row 1, but by the position ids there are 13"),
    ):
        cache = QuantMLACache(model.config, FMT, mask)
        with pytest.raises(UsageError, match=words):
            model.generate(**batch, past_key_values=cache, **settings)


def test_a_mask_is_followed_by_any_prompt_of_its_padding(model, drafter, batch):
    """In chunks, without position ids, with drafts at once, and longer after a reset."""
    mask, row = batch["attention_mask"], {name: x[1:] for name, x in batch.items()}
    settings = dict(max_new_tokens=5, **GREEDY)
    cache = QuantMLACache(model.config, FMT, mask)
    for chunk in (7, 13, 50):
        chunked = QuantMLACache(model.config, FMT, mask)
        model.generate(**batch, past_key_values=chunked, prefill_chunk_size=chunk, **settings)
        assert chunked.layers[0].paged.lengths == [PROMPT + 4, PROMPT + 4 - PAD]
    model(**batch, past_key_values=cache)
    assert cache.layers[1].paged.lengths == [PROMPT, PROMPT - PAD]
    cache.reset()
    longer = {name: torch.cat((x, torch.ones_like(x)), 1) for name, x in batch.items()}
    model.generate(**longer, past_key_values=cache, **settings)
    assert cache.layers[0].paged.lengths == [2 * PROMPT + 4, 2 * PROMPT + 4 - PAD]
    assisted = QuantMLACache(model.config, FMT, row["attention_mask"])
    model.generate(**row, past_key_values=assisted, assistant_model=drafter, **settings)
    assert assisted.layers[0].padding == [PAD]


def test_arguments_of_another_kind_are_one_sentence(model):
    for wrong in ("c4r4", None):
        with pytest.raises(UsageError, match="not a CacheFormat: make one with parse_format"):
            QuantMLACache(model.config, wrong)
    for wrong in ("out/c4r4", model):
        with pytest.raises(UsageError, match=r"give model\.config"):
            QuantMLACache(wrong, FMT)
        with pytest.raises(UsageError, match=r"give model\.config"):
            QuantMLACache.from_config(wrong)
    for wrong in (3, None, "1", ["1", 0], [True]):
        with pytest.raises(UsageError, match=r"skip_layers is .*, not a list of layers' numbers"):
            QuantMLACache(model.config, FMT, skip_layers=wrong)
    layer = QuantMLALayer(FMT, "half")
    layer.update(torch.zeros(2, 1, 5, 32), torch.zeros(2, 1, 5, 16))
    for wrong in (None, "a", 2.5, torch.tensor(2.5), torch.tensor([1, 2])):
        with pytest.raises(UsageError, match=r"the tokens to crop are .*, not a whole number"):
            layer.crop(wrong)
    for wrong in (torch.tensor([5]), torch.tensor([-3]), torch.tensor([True]), None, "a"):
        for select in (layer.batch_select_indices, layer.reorder_cache):
            with pytest.raises(UsageError, match=r"cannot be selected from a batch of 2"):
                select(wrong)
    for wrong in (None, 0, 1.5):
        with pytest.raises(UsageError, match="the repeats of a batch are"):
            layer.batch_repeat_interleave(wrong)
    assert layer.paged.lengths == [5, 5]


@pytest.mark.gpu
def test_on_a_gpu_the_bytes_are_those_of_the_cpu():
    g = torch.Generator().manual_seed(0)
    latent, k_rope = torch.randn(2, 1, 90, 32, generator=g), torch.randn(2, 1, 90, 16, generator=g)
    host, device = QuantMLALayer(FMT, "half", [0, 7]), QuantMLALayer(FMT, "half", [0, 7])
    for t in (slice(0, 40), *(slice(i, i + 1) for i in range(40, 90))):
        a = host.update(latent[:, :, t], k_rope[:, :, t])
        b = device.update(latent[:, :, t].cuda(), k_rope[:, :, t].cuda())
    assert all(torch.equal(x, y.cpu()) for x, y in zip(a, b, strict=True))
    assert torch.equal(host.paged.pages(1), device.paged.pages(1).cpu())


@pytest.mark.parametrize("mask", [torch.ones(0, 0), torch.ones(2, 0), torch.ones(3), [[1, 1]]])
def test_masks_that_say_nothing_are_refused(mask, model):
    with pytest.raises(UsageError, match="attention_mask must be 2-D"):
        QuantMLACache(model.config, FMT, mask)


@pytest.mark.parametrize("value", [float("nan"), 2, -1])
def test_a_mask_of_other_values_is_refused(value, model):
    mask = torch.tensor([[0.0, value, 1.0], [0.0, 1.0, 1.0]])
    with pytest.raises(UsageError, match=r"must hold 0 for padding and 1 for all else"):
        QuantMLACache(model.config, FMT, mask)
    assert QuantMLACache(model.config, FMT, mask[1:].bool()).layers[0].padding == [1]


def test_states_that_do_not_fit_the_cache_are_refused(model):
    def states(batch, rank, rope):
        return torch.randn(batch, 1, 3, rank), torch.randn(batch, 1, 3, rope)

    with pytest.raises(UsageError, match="rope_order 'foo' is not one of"):
        QuantMLACache(model.config, FMT, rope_order="foo")
    cache = QuantMLACache(model.config, FMT)
    with pytest.raises(UsageError, match="batch of 0"):
        cache.update(*states(0, 64, 16), 0)
    cache.update(*states(2, 64, 16), 0)
    for wrong in ((2, 32, 16), (2, 64, 8)):
        with pytest.raises(UsageError, match="has shape"):
            cache.update(*states(*wrong), 0)


def test_every_layer_is_packed_in_its_own_format(model, batch):
    two = parse_format("c2r4", **SMALL, recent_window=32)
    cache = QuantMLACache(model.config, MixedFormat(default=FMT, layers={1: two}))
    alone = {fmt.name: QuantMLACache(model.config, fmt) for fmt in (FMT, two)}
    for past in (cache, *alone.values()):
        with torch.inference_mode():
            model(batch["input_ids"][:1], past_key_values=past)
    assert torch.equal(pages(cache, 0)[0], pages(alone["c4r4"], 0)[0])
    assert torch.equal(pages(cache, 0)[1], pages(alone["c2r4"], 0)[1])
    with pytest.raises(UsageError, match=r"\[9\]"):
        QuantMLACache(model.config, MixedFormat(default=FMT, layers={9: two}))
