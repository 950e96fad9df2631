"""Capture against the whole model, and against the readable attention."""

import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import CASES, load, random_tokens, rewrite_tensors
from torch import Tensor

from quantmla.arch import adapter_for
from quantmla.capture import decoder
from quantmla.capture.layer import LayerCapture
from quantmla.capture.record import attentions, recording
from quantmla.capture.stream import CapturedSite, CaptureSettings, captured_layers
from quantmla.checkpoint.source import open_source
from quantmla.errors import QuantMLAError, UsageError
from quantmla.interrupts import interrupts_noted
from quantmla.mla.attention import attention_expanded, causal_mask
from quantmla.mla.rope import to_interleaved

Folder = Callable[[str], Path]
TENSORS = ("unit_latent_BSR", "k_rope_BSE", "q_content_BSNP", "q_rope_BSNE")
BATCH = 2


def tokens(sequences: int = 3, length: int = 40) -> Tensor:
    return torch.cat([random_tokens(seed, length)[:1] for seed in range(sequences)])


def capture(folder: Path, tokens_BS: Tensor, skip: tuple[str, ...] = (), **settings):
    source = open_source(folder)
    adapter = adapter_for(source.config)
    options = CaptureSettings(batch_size=BATCH, **settings)
    return captured_layers(source, adapter, tokens_BS, options, skip=skip)


def copied(found: CapturedSite) -> dict[str, Tensor]:
    return {name: getattr(found.capture, name).clone() for name in TENSORS}


@torch.no_grad()
def whole_model(
    folder: Path, tokens_BS: Tensor, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> dict[str, dict[str, Tensor]]:
    """What stock transformers computes in one go, in the same batches: per site, in order."""
    model = load(folder, dtype).model.to(device)  # RoPE's frequencies stay float32
    modules = {str(index): module for index, module in enumerate(attentions(model))}
    out: dict[str, dict[str, list[Tensor]]] = {name: {} for name in modules}
    for name, module in modules.items():
        module.register_forward_hook(
            lambda _, __, result, name=name: out[name].setdefault("output", []).append(result[0])
        )
    with recording(modules) as taken:
        for begin in range(0, len(tokens_BS), BATCH):
            model(input_ids=tokens_BS[begin : begin + BATCH].to(device), use_cache=False)
            for name, values in taken.items():
                for key, x in values.items():
                    out[name].setdefault(key, []).append(x.cpu())
    return {name: {key: torch.cat(xs) for key, xs in v.items()} for name, v in out.items()}


def require_equal(got: LayerCapture, expected: dict[str, Tensor]) -> None:
    """The same numbers as in a forward pass of the whole model, bit for bit."""
    assert torch.equal(got.unit_latent_BSR, expected["unit_latent"])
    query = expected["query"].split((got.q_content_BSNP.shape[-1], got.q_rope_BSNE.shape[-1]), -1)
    assert torch.equal(got.q_content_BSNP, query[0])
    assert torch.equal(got.q_rope_BSNE, to_interleaved(query[1], got.rope_order))
    assert torch.equal(got.k_rope_BSE, to_interleaved(expected["k_rope"], got.rope_order))


@pytest.mark.parametrize("case", CASES)
def test_captures_are_the_models_own_and_give_its_attention_output(
    case: str, tiny_checkpoint: Folder
) -> None:
    folder, ids = tiny_checkpoint(case), tokens()
    source = open_source(folder)
    adapter = adapter_for(source.config)
    whole = list(whole_model(folder, ids).values())
    seen = list(captured_layers(source, adapter, ids, CaptureSettings(batch_size=BATCH)))
    assert [found.site for found in seen] == adapter.sites(source.config, source.names)
    assert len(seen) == len(whole)
    for (site, got), expected in zip(seen, whole, strict=True):
        require_equal(got, expected)
        # and, with the adapter's weights, they mean what the readable attention takes them for
        weights = adapter.read(source, site)
        name = f"{site.prefix}.o_proj.bias"
        bias = source.float_tensor(name) if name in source.names else 0.0
        mask = causal_mask(ids.shape[1], ids.shape[1])
        for b in range(len(ids)):
            inputs = got.inputs(b, weights.norm_R)
            output = attention_expanded(weights, inputs, got.softmax_scale, mask) + bias
            true = expected["output"][b].double()
            # float32 sums of at most 64 terms in three stages
            assert (output - true).norm() <= 1e-5 * true.norm()


def test_rope_order_matters_to_the_reference(tiny_checkpoint: Folder) -> None:
    """The comparison above can fail: queries left in the cache's order miss by far."""
    folder, ids = tiny_checkpoint("deepseek_v3"), tokens(1)
    source = open_source(folder)
    site, got = next(iter(capture(folder, ids)))
    weights = adapter_for(source.config).read(source, site)
    inputs = got.inputs(0, weights.norm_R)
    right = attention_expanded(weights, inputs, got.softmax_scale)
    turned = inputs._replace(q_rope_SNE=to_interleaved(inputs.q_rope_SNE, "half"))
    wrong = attention_expanded(weights, turned, got.softmax_scale)
    assert (wrong - right).norm() > 0.01 * right.norm()


@pytest.mark.parametrize("case", ["deepseek_v3", "longcat_flash", "kimi_linear"])
def test_files_and_memory_hold_the_same(case: str, tiny_checkpoint: Folder, tmp_path: Path) -> None:
    folder, ids = tiny_checkpoint(case), tokens()
    in_memory = [copied(found) for found in capture(folder, ids)]
    on_disk = []
    for found in capture(folder, ids, workdir=tmp_path, memory_limit=0):
        assert len(list(tmp_path.glob("capture_*.safetensors"))) == len(TENSORS)
        on_disk.append(copied(found))
    assert list(tmp_path.iterdir()) == []
    for a, b in zip(in_memory, on_disk, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in TENSORS)


def many_layers(tiny_checkpoint: Folder, out: Path, layers: int) -> Path:
    """The tiny Youtu with its last layer repeated."""
    folder = tiny_checkpoint("youtu")
    source = open_source(folder)
    last = [name for name in source.names if ".layers.1." in name]
    more = {
        name.replace(".layers.1.", f".layers.{layer}."): source.tensor(name)
        for name in last
        for layer in range(2, layers)
    }
    return rewrite_tensors(folder, out, more, num_hidden_layers=layers)


@pytest.mark.parametrize("stop_at", [0, 1, 3])
def test_resume_gives_the_same_bytes_without_the_layers_before(
    stop_at: int, tiny_checkpoint: Folder, tmp_path: Path
) -> None:
    folder, ids = many_layers(tiny_checkpoint, tmp_path / "model", 5), tokens()
    work = tmp_path / "work"
    whole = {found.site.prefix: copied(found) for found in capture(folder, ids)}
    done = []
    stream = capture(folder, ids, workdir=work)
    for found in stream:
        if found.site.layer == stop_at:
            break  # killed while this layer is being fitted
        done.append(found.site.prefix)
    stream.close()
    (work / "hidden_4.safetensors.partial").write_bytes(b"half")
    stages: list[str] = []
    source = open_source(folder)
    rest = captured_layers(
        source,
        adapter_for(source.config),
        ids,
        CaptureSettings(batch_size=BATCH, workdir=work),
        skip=done,
        on_progress=lambda stage, _, __: stages.append(stage),
    )
    resumed = {found.site.prefix: copied(found) for found in rest}
    assert set(resumed) == set(whole) - set(done)
    assert stages[0] == f"capture layer {stop_at}"
    for prefix, tensors in resumed.items():
        assert all(torch.equal(tensors[name], whole[prefix][name]) for name in TENSORS)
    assert list(work.iterdir()) == []


def test_hidden_states_of_other_tokens_are_not_resumed_from(
    tiny_checkpoint: Folder, tmp_path: Path
) -> None:
    folder = many_layers(tiny_checkpoint, tmp_path / "model", 3)
    stream = capture(folder, tokens(), workdir=tmp_path / "work")
    first = next(stream).site.prefix
    next(stream)
    stream.close()
    other = tokens().flip(1)
    expected = [copied(found) for found in capture(folder, other)][1:]
    got = [copied(f) for f in capture(folder, other, (first,), workdir=tmp_path / "work")]
    for a, b in zip(expected, got, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in TENSORS)


def test_hidden_states_of_another_shape_or_name_are_not_resumed_from(
    tiny_checkpoint: Folder, tmp_path: Path
) -> None:
    folder, work = many_layers(tiny_checkpoint, tmp_path / "model", 3), tmp_path / "work"
    expected = [copied(found) for found in capture(folder, tokens())][1:]
    stream = capture(folder, tokens(), workdir=work)
    first = next(stream).site.prefix
    next(stream)
    stream.close()
    path = work / "hidden_1.safetensors"
    with safe_open(path, "pt") as file:
        mark, rows = file.metadata(), file.get_tensor("activations")
    edits = ({"activations": rows[1:]}, {"activations": rows.double()}, {"rows": rows})
    for edit in edits:
        save_file(edit, path, metadata=mark)
        (work / "hidden_x.safetensors").write_bytes(b"a copy")
        got = [copied(found) for found in capture(folder, tokens(), (first,), workdir=work)]
        for a, b in zip(expected, got, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in TENSORS)
        assert not list(work.iterdir())


def live_bytes() -> int:
    """Of all tensors outside files, meta tensors left out."""
    found = {}
    for x in gc.get_objects():
        if issubclass(type(x), Tensor) and x.device.type != "meta":
            storage = x.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def peak(folder: Path, ids: Tensor, work: Path) -> int:
    """Most bytes of tensors that live while a layer runs or its capture is out."""
    seen: list[int] = []
    before = live_bytes()
    source = open_source(folder)
    for _ in captured_layers(
        source,
        adapter_for(source.config),
        ids,
        CaptureSettings(batch_size=BATCH, workdir=work),
        on_progress=lambda *_: seen.append(live_bytes() - before),
    ):
        seen.append(live_bytes() - before)
    return max(seen)


def test_memory_does_not_grow_with_the_number_of_layers(
    tiny_checkpoint: Folder, tmp_path: Path
) -> None:
    few = many_layers(tiny_checkpoint, tmp_path / "few", 3)
    many = many_layers(tiny_checkpoint, tmp_path / "many", 9)
    ids = tokens(BATCH, 16)
    one_layer = sum(
        open_source(few).tensor(name).nbytes
        for name in open_source(few).names
        if ".layers.1." in name
    )
    small, large = peak(few, ids, tmp_path / "a"), peak(many, ids, tmp_path / "b")
    assert small >= one_layer  # the measure sees the layer that runs
    assert large - small < one_layer / 2  # 6 more layers, not even half a layer more


def test_fp8_checkpoint_runs_with_its_values(tiny_checkpoint: Folder, tmp_path: Path) -> None:
    from quantmla.checkpoint.block_fp8 import dequantize_blocks, quantize_blocks

    folder, block = tiny_checkpoint("deepseek_v3"), (32, 32)
    source = open_source(folder)
    plain, packed = {}, {}
    for name in source.names:
        if ".layers." in name and name.endswith("proj.weight"):
            codes, scale = quantize_blocks(source.tensor(name), block)
            packed |= {name: codes, f"{name}_scale_inv": scale}
            plain[name] = dequantize_blocks(codes, scale, block).float()
    fp8 = {"quant_method": "fp8", "weight_block_size": list(block)}
    quantized = rewrite_tensors(folder, tmp_path / "fp8", packed, quantization_config=fp8)
    unpacked = rewrite_tensors(folder, tmp_path / "plain", plain)
    for a, b in zip(capture(quantized, tokens()), capture(unpacked, tokens()), strict=True):
        assert all(torch.equal(getattr(a.capture, n), getattr(b.capture, n)) for n in TENSORS)


def test_mtp_layers_are_not_run(tiny_checkpoint: Folder, tmp_path: Path) -> None:
    folder = tiny_checkpoint("deepseek_v3")
    source = open_source(folder)
    extra = {
        name.replace(".layers.1.", ".layers.2."): source.tensor(name)
        for name in source.names
        if ".layers.1." in name
    }
    extra["model.layers.2.embed_tokens.weight"] = source.tensor("model.embed_tokens.weight") + 1
    with_mtp = rewrite_tensors(folder, tmp_path / "mtp", extra)
    assert any(
        s.mtp for s in adapter_for(source.config).sites(source.config, open_source(with_mtp).names)
    )
    for a, b in zip(capture(folder, tokens()), capture(with_mtp, tokens()), strict=True):
        assert a.site == b.site
        assert all(torch.equal(getattr(a.capture, n), getattr(b.capture, n)) for n in TENSORS)


def test_dtypes_of_a_bf16_checkpoint(tiny_checkpoint: Folder) -> None:
    found = next(iter(capture(tiny_checkpoint("deepseek_v2"), tokens(), dtype=torch.bfloat16)))
    kinds = {
        f.name: getattr(found.capture, f.name).dtype
        for f in fields(found.capture)
        if f.name in TENSORS
    }
    assert kinds.pop("unit_latent_BSR") == torch.float32
    assert set(kinds.values()) == {torch.bfloat16}


def test_not_a_number_in_activations_names_the_layer(
    tiny_checkpoint: Folder, tmp_path: Path
) -> None:
    folder = tiny_checkpoint("youtu")
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    bad = open_source(folder).tensor(name).clone()
    bad[3] = 3e38
    broken = rewrite_tensors(folder, tmp_path / "broken", {name: bad})
    stream = capture(broken, tokens(), workdir=tmp_path / "work")
    assert next(stream).site.layer == 0
    with pytest.raises(QuantMLAError, match="layer 1"):
        next(stream)
    # what is left is a whole file to go on from, once the checkpoint is mended
    assert [f.name for f in (tmp_path / "work").iterdir()] == ["hidden_1.safetensors"]


def test_an_attention_that_does_not_run_is_named(
    tiny_checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.youtu import modeling_youtu

    # a layer type that leaves its attention out
    monkeypatch.setattr(
        modeling_youtu.YoutuDecoderLayer, "forward", lambda self, hidden_states, **_: hidden_states
    )
    with pytest.raises(QuantMLAError, match=r"layer 0 \(model.layers.0.self_attn\) saw no"):
        next(iter(capture(tiny_checkpoint("youtu"), tokens())))


@pytest.mark.parametrize(
    ("tokens_BS", "sentence"),
    [
        (torch.zeros(0, 8, dtype=torch.long), "at least one of each"),
        (torch.zeros(8, dtype=torch.long), "at least one of each"),
        (torch.full((1, 8), 256), "vocabulary of 256"),
        (torch.full((1, 8), -1), "vocabulary of 256"),
        (torch.zeros(1, 2561, dtype=torch.long), "2560 positions"),
    ],
)
def test_tokens_that_the_model_cannot_take(
    tokens_BS: Tensor, sentence: str, tiny_checkpoint: Folder
) -> None:
    with pytest.raises(UsageError, match=sentence):
        capture(tiny_checkpoint("youtu"), tokens_BS)


@pytest.mark.parametrize("change", [{"batch_size": 0}, {"memory_limit": -1}])
def test_settings_that_cannot_be_meant(change: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(change))):
        CaptureSettings(**change)


def test_missing_and_misshapen_tensors_name_the_layer(
    tiny_checkpoint: Folder, tmp_path: Path
) -> None:
    folder = tiny_checkpoint("youtu")
    name = "model.layers.1.mlp.up_proj.weight"
    short = rewrite_tensors(folder, tmp_path / "short", {name: torch.zeros(4, 4)})
    stream = capture(short, tokens())
    next(stream)
    with pytest.raises(QuantMLAError, match="layer 1 of the checkpoint does not fit"):
        next(stream)
    from safetensors.torch import load_file, save_file

    file = short / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    stream = capture(short, tokens())
    next(stream)
    with pytest.raises(QuantMLAError, match=r"lacks 1 parameters of layer 1.*up_proj"):
        next(stream)


@pytest.fixture(params=[False, True], ids=["alone", "within the command line"])
def usual_ctrl_c(request: pytest.FixtureRequest) -> Iterator[None]:
    """A run in the background of a shell is given processes that ignore it."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    with interrupts_noted() if request.param else nullcontext():
        yield
    signal.signal(signal.SIGINT, inherited)


@pytest.mark.usefixtures("usual_ctrl_c")
@pytest.mark.parametrize("then_fails", [False, True])
def test_ctrl_c_while_a_layer_is_loaded_is_no_fault_of_the_checkpoint(
    tiny_checkpoint: Folder, monkeypatch: pytest.MonkeyPatch, then_fails: bool
) -> None:
    stock = decoder._tensors
    handler = signal.getsignal(signal.SIGINT)

    def tensors(skeleton: decoder.Skeleton, layer: int | None) -> dict[str, Tensor]:
        signal.raise_signal(signal.SIGINT)
        if then_fails:  # as torch's C++ answers when its call into Python is interrupted
            raise RuntimeError("could not determine the shape of object type 'torch.storage'")
        return stock(skeleton, layer)

    monkeypatch.setattr(decoder, "_tensors", tensors)
    with pytest.raises(KeyboardInterrupt):
        next(iter(capture(tiny_checkpoint("deepseek_v3"), tokens())))
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.usefixtures("usual_ctrl_c")
def test_a_second_ctrl_c_does_not_wait_for_the_layer(
    tiny_checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tensors(*_: object) -> dict[str, Tensor]:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("went on")

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(decoder, "_tensors", tensors)
    with pytest.raises(KeyboardInterrupt):
        next(iter(capture(tiny_checkpoint("deepseek_v3"), tokens())))
    assert signal.getsignal(signal.SIGINT) is handler


def test_out_of_memory_names_what_to_lower(
    tiny_checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.youtu import modeling_youtu

    def burst(self, hidden_states, **_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(modeling_youtu.YoutuDecoderLayer, "forward", burst)
    with pytest.raises(QuantMLAError, match=r"layer 0: lower batch_size \(2\)"):
        next(iter(capture(tiny_checkpoint("youtu"), tokens())))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_sees_what_the_whole_model_sees_there(
    dtype: torch.dtype, device: str, tiny_checkpoint: Folder, tmp_path: Path
) -> None:
    folder, ids = tiny_checkpoint("deepseek_v3"), tokens()
    whole = whole_model(folder, ids, dtype, device).values()
    seen = capture(folder, ids, device=device, dtype=dtype, workdir=tmp_path, memory_limit=0)
    for found, expected in zip(seen, whole, strict=True):
        assert found.capture.unit_latent_BSR.device.type == "cpu"
        require_equal(found.capture, expected)
