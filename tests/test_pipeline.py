"""`quantize` and `verify` on tiny checkpoints, as a user runs them."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from held import stopped
from killed import killed_before
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import add_tokenizer, build, logits, random_tokens, rewrite_tensors

from quantmla import pipeline
from quantmla.arch import adapter_for
from quantmla.checkpoint.source import open_source
from quantmla.cli import main
from quantmla.evaluate.stored import as_bf16
from quantmla.inspection import inspect_model
from quantmla.manifest import CONFIG_KEY
from quantmla.quant.format import CacheFormat
from quantmla.quant.layout import page_layout
from quantmla.quant.mixed import describe, format_from_json, uniform_format
from quantmla.recipe import load_recipe
from quantmla.serve.transformers import QuantMLACache
from quantmla.transform.layer import LayerTransform
from quantmla.transform.store import FILE_NAME, transforms_from_file
from quantmla.verify import load_model, relative_error
from quantmla.workdir import STATE

pytestmark = pytest.mark.usefixtures("read_short")
Tiny = Callable[[str], Path]
PAPER = {"method": "paper", "options": {"steps": 3, "batch_size": 2}}
RTN = {"method": "rtn", "options": {}}
OURS = {"method": "quantmla", "options": {"steps": 3, "rope_steps": 3}}
FLOAT32_FLOOR = 1e-4  # of logits, relative: as in tests/fuse/test_checkpoint.py
WRITTEN = {
    *("recipe.yaml", "quantmla_log.csv", "quantmla_log.json", "README.md", FILE_NAME),
    "quantmla_run.json",
}


@pytest.fixture
def recipe(short_text: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Writes a recipe; returns the arguments of a quiet `quantize` of it."""

    def write(
        model: Path,
        out: Path,
        transform: dict[str, Any] = RTN,
        *flags: str,
        calibration: dict[str, Any] | None = None,
        **fmt: Any,
    ) -> list[str]:
        amounts = {"num_sequences": 3, "held_out_sequences": 2, "sequence_length": 64}
        data = {
            "model": {"id": str(model)},
            "calibration": {"text": str(short_text), "device": "cpu"}
            | amounts
            | (calibration or {}),
            "format": {"name": "c4r4", "group_size": 16} | fmt,
            "transform": transform,
            "output": {"folder": str(out)},
        }
        path = tmp_path / f"{out.name}.yaml"
        path.write_text(yaml.safe_dump(data))
        return ["quantize", "--recipe", str(path), "--quiet", "--json", *flags]

    return write


def read(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], code: int, argv: list[str]) -> str:
    """The one line that a command which must fail with `code` says."""
    capsys.readouterr()
    assert main(argv) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("quantmla: error: ")
    assert shown.err.count("\n") == 1
    return shown.err


def tampered(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Changes one stored tensor in place."""
    source = open_source(folder)
    shard = folder / source.shard_of[name]
    tensors = load_file(shard)
    tensors[name] = change(tensors[name])
    with safe_open(shard, framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, shard, metadata=metadata)


def assert_same_result(a: Path, b: Path) -> None:
    """Weights, transforms and config of two outputs, byte for byte."""
    names = sorted(path.name for path in a.iterdir())
    assert names == sorted(path.name for path in b.iterdir())
    for name in names:
        if name.endswith((".safetensors", "config.json", "index.json")):
            assert (a / name).read_bytes() == (b / name).read_bytes(), name


@pytest.mark.parametrize(
    ("case", "transform", "fmt"),
    [
        ("deepseek_v3", OURS, {}),
        ("longcat_flash", PAPER, {"name": "c2r4"}),  # two attentions per layer, multipliers
        ("kimi_linear", OURS, {}),  # no rotation by position, a linear layer
        ("minicpm3", PAPER, {}),  # half-split rope rows
        ("youtu", OURS, {"name": "c4r16"}),
        ("deepseek_v2", OURS, {"name": "c16r4", "sinks": 0, "recent": 64}),
    ],
)
def test_a_quantized_model_is_the_same_model(  # noqa: PLR0913
    case: str, transform: dict, fmt: dict, recipe, tiny_model: Tiny, tmp_path: Path, capsys
):
    model, out = tiny_model(case), tmp_path / "out"
    assert main(recipe(model, out, transform, **fmt)) == 0
    summary = read(capsys)
    source, fused = open_source(model), open_source(out)
    adapter = adapter_for(source.config)
    sites = adapter.sites(source.config, source.names)
    assert summary["layers_fused"] == len(sites)
    assert summary["largest_fold_error"] < 1e-12
    for error in ("content_output_error", "rope_score_error"):
        assert summary[error]["after"] <= 1.1 * summary[error]["before"]

    # every engine that ran the original runs this
    floor = FLOAT32_FLOOR
    tokens = random_tokens()
    assert relative_error(logits(out, tokens), logits(model, tokens)) < floor
    assert fused.names == source.names
    for name in source.names:
        assert (fused.shape(name), fused.dtype(name)) == (source.shape(name), source.dtype(name))

    # one key more, all other bytes of the config as they were
    config = dict(fused.config)
    entry = config.pop(CONFIG_KEY)
    assert config == source.config
    assert list(fused.config)[:-1] == list(source.config)
    assert CacheFormat.from_json(entry["format"]).name == fmt.get("name", "c4r4")
    assert entry["base_sha256"] == source.digest()
    assert (entry["ignored_layers"], entry["copied_layers"]) == ([], [])
    old, new = ({path.name for path in folder.iterdir()} for folder in (model, out))
    assert new == old | WRITTEN
    assert not (tmp_path / "out.work").exists()

    transforms = transforms_from_file(out / FILE_NAME)
    assert set(transforms) == {site.prefix for site in sites}
    latent = fused.float_tensor(f"{sites[0].prefix}.kv_a_layernorm.weight")
    factor = adapter.multipliers(adapter.geometry(source.config))[0]
    scale = transforms[sites[0].prefix].content.scale_R
    assert torch.allclose(factor * latent, scale, rtol=1e-6)
    resolved = yaml.safe_load((out / "recipe.yaml").read_text())
    assert resolved["calibration"]["num_sequences"] == 3
    assert len((out / "quantmla_log.csv").read_text().splitlines()) == 1 + len(sites)
    assert len(json.loads((out / "quantmla_log.json").read_text())) == len(sites)


def test_a_bf16_checkpoint_changes_by_no_more_than_its_own_rounding(recipe, tmp_path: Path, capsys):
    # a dense model: experts that a rounded router swaps would change outputs in jumps
    exact = build("youtu", tmp_path / "float32")
    model = add_tokenizer(build("youtu", tmp_path / "model", dtype=torch.bfloat16))
    out, tokens = tmp_path / "out", random_tokens()
    before = logits(model, tokens)
    # what rounding every weight of the model to bf16 does; folding rounds some of them again
    floor = relative_error(before, logits(exact, tokens))
    assert main(recipe(model, out, OURS)) == 0
    assert 0 < relative_error(logits(out, tokens), before) < 2 * floor
    assert main(["verify", str(out), "--json"]) == 0
    capsys.readouterr()
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    tampered(out, name, lambda x: (1.1 * x.float()).to(x.dtype))
    assert name.rsplit(".", 2)[0] in refused(capsys, 4, ["verify", str(out)])


@pytest.fixture(scope="module")
def fused_once(tiny_model: Tiny, short_text: Path, tmp_path_factory) -> Path:
    """A fused deepseek_v3; not to be modified."""
    out = tmp_path_factory.mktemp("fused") / "out"
    argv = ["quantize", str(tiny_model("deepseek_v3")), "-o", str(out), "--method", "smoothquant"]
    argv += ["--text", str(short_text), "--num-sequences", "2", "--sequence-length", "64"]
    path = out.parent / "r.yaml"
    path.write_text("format: {group_size: 16}\ncalibration: {held_out_sequences: 1}\n")
    assert main([*argv, "--recipe", str(path), "--quiet"]) == 0
    return out


@pytest.fixture
def fused(fused_once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(fused_once, tmp_path / "fused")


def test_verify_reports_every_layer_and_the_logits(fused: Path, capsys):
    assert main(["verify", str(fused), "--json"]) == 0
    found = read(capsys)
    assert [layer["prefix"] for layer in found["layers"]] == [
        f"model.layers.{i}.self_attn" for i in range(2)
    ]
    for layer in found["layers"]:
        assert layer["fold_error"] < 1e-12
        # same machine: the weights on disk are those that folding makes, bit for bit
        assert layer["stored_error"] == layer["rounding_error"] > 0
    assert found["logits_relative_error"] < FLOAT32_FLOOR
    assert found["tokens"] == 2 * 511


def test_verify_sees_a_tampered_attention(fused: Path, capsys):
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    tampered(fused, name, lambda x: x * (1 + 1e-4 * torch.randn(x.shape)))
    said = refused(capsys, 4, ["verify", str(fused)])
    assert "the stored weights of model.layers.0.self_attn change its output by" in said


def test_verify_sees_one_changed_number_outside_attention(fused: Path, capsys):
    name = "model.layers.1.input_layernorm.weight"

    def one_step(x: torch.Tensor) -> torch.Tensor:
        x[5] = torch.nextafter(x[5], torch.tensor(9.0))
        return x

    tampered(fused, name, one_step)
    said = refused(capsys, 4, ["verify", str(fused)])
    assert f"1 tensors that fusing leaves alone are not the original's: {name}" in said


def test_verify_sees_a_changed_config(fused: Path, capsys):
    config = json.loads((fused / "config.json").read_text())
    (fused / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-2}))
    said = refused(capsys, 4, ["verify", str(fused)])
    assert "is not the original's: it differs in rms_norm_eps" in said


def test_a_place_that_has_moved_is_said_to_be_the_recorded_one(fused: Path, capsys):
    config = json.loads((fused / "config.json").read_text())
    config["quantmla_config"]["base_model"] = "in"
    (fused / "config.json").write_text(json.dumps(config))
    for command, flag in (("verify", "--against"), ("eval", "--baseline")):
        said = refused(capsys, 1, [command, str(fused)])
        assert "no model at 'in'" in said
        assert f"'in' is the base_model in config.json of {fused}" in said
        assert f"say with {flag} where it is now" in said


def test_verify_sees_transforms_that_are_none(fused: Path, capsys):
    """A rotation that is not orthogonal does not pass through the norm."""
    from quantmla.transform.store import transforms_to_bytes

    def bent(transform: LayerTransform) -> LayerTransform:
        transform.content.rotation_RR[0, 1] += 0.01
        return transform

    transforms = transforms_from_file(fused / FILE_NAME)
    (fused / FILE_NAME).write_bytes(
        transforms_to_bytes({k: bent(t) for k, t in transforms.items()})
    )
    assert "fusing changed model.layers" in refused(capsys, 4, ["verify", str(fused)])


def test_verify_wants_the_original(fused: Path, tiny_model: Tiny, capsys):
    model = str(tiny_model("deepseek_v3"))
    assert "was not written by quantmla" in refused(capsys, 2, ["verify", model])
    other = str(tiny_model("youtu"))
    said = refused(capsys, 1, ["verify", str(fused), "--against", other])
    assert "their hashes differ" in said
    assert "no model at ''" in refused(capsys, 1, ["verify", str(fused), "--against", ""])
    (fused / FILE_NAME).unlink()
    said = refused(capsys, 1, ["verify", str(fused), "--against", model])
    assert f"{FILE_NAME} does not exist" in said


@pytest.mark.parametrize("indexed", [True, False])
def test_engines_find_the_original_tensors_and_no_others(
    recipe, tiny_model: Tiny, tmp_path: Path, indexed: bool
):
    """Without an index, vLLM loads every tensor of every *.safetensors in the folder."""
    loader = pytest.importorskip("vllm.model_executor.model_loader.default_loader")
    from vllm.config.load import LoadConfig

    model = shutil.copytree(tiny_model("deepseek_v3"), tmp_path / "model")
    names = set(open_source(model).names)
    if not indexed:
        shards = list(model.glob("*.safetensors"))
        tensors = {name: x for shard in shards for name, x in load_file(shard).items()}
        for old in (*shards, *model.glob("*.index.json")):
            old.unlink()
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "out"
    assert main(recipe(model, out)) == 0
    config = LoadConfig(load_format="safetensors")
    _, files, _ = loader.DefaultModelLoader(config)._prepare_weights(
        str(out), None, None, False, None
    )
    found: set[str] = set()
    for file in files:
        with safe_open(file, "pt") as tensors:
            found |= set(tensors.keys())
    assert found == names


def test_a_fused_model_is_not_fused_again(fused: Path, recipe, tmp_path: Path, capsys):
    said = refused(capsys, 2, recipe(fused, tmp_path / "again"))
    assert "is already fused by quantmla: give the original" in said


def test_an_output_is_replaced_only_when_asked(recipe, tiny_model: Tiny, tmp_path: Path, capsys):
    model, out = tiny_model("deepseek_v3"), tmp_path / "out"
    assert main(recipe(model, out, RTN)) == 0
    before = (out / FILE_NAME).read_bytes()
    said = refused(capsys, 2, recipe(model, out, PAPER))
    assert "exists: choose another output folder, or pass --overwrite" in said
    assert (out / FILE_NAME).read_bytes() == before
    # a work folder that an earlier, killed run of other settings left is in nobody's way then
    work = tmp_path / "out.work"
    work.mkdir()
    (work / "state.json").write_text("{}")
    assert main(recipe(model, out, PAPER, "--overwrite")) == 0
    assert (out / FILE_NAME).read_bytes() != before
    assert not work.exists()
    stray = tmp_path / "stray"
    stray.mkdir()
    (stray / "thesis.txt").write_text("years")
    said = refused(capsys, 2, recipe(model, stray, RTN, "--overwrite"))
    assert "is not an earlier output, so --overwrite does not replace it" in said


def test_a_failed_write_keeps_the_layers_and_nothing_of_the_output(
    recipe, tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    model, out = tiny_model("deepseek_v3"), tmp_path / "out"
    assert main(recipe(model, tmp_path / "whole", PAPER)) == 0

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    argv = recipe(model, out, PAPER)
    with monkeypatch.context() as patched:
        patched.setattr("quantmla.checkpoint.rewrite._put_in_place", interrupted)
        said = refused(capsys, 130, argv)
    assert (
        f"interrupted while writing {out}; nothing of it was kept; finished layers are in" in said
    )
    assert not out.exists()
    assert not list(tmp_path.glob("out.part*"))
    with monkeypatch.context() as patched:  # nothing is learned again
        patched.setattr("quantmla.learn._fit_site", interrupted)
        assert main([*argv, "--resume"]) == 0
    assert_same_result(out, tmp_path / "whole")


class Killed(Exception):
    pass


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Killed])
def test_a_run_that_was_stopped_in_its_check_goes_on_there(
    stop: type[BaseException], recipe, tiny_model: Tiny, tmp_path: Path, monkeypatch, capsys
):
    model, out = tiny_model("deepseek_v3"), tmp_path / "out"

    def stopped(*args: Any, **kwargs: Any) -> None:
        raise stop

    argv = recipe(model, out)
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "verify_layers", stopped)
        if stop is KeyboardInterrupt:
            said = refused(capsys, 130, argv)
            assert f"{out} is written but not checked: go on with --resume, or check it" in said
        else:
            with pytest.raises(Killed):
                main(argv)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert main(["verify", str(out)]) == 0
    assert "exists: choose another output folder" in refused(capsys, 2, argv)
    # the transforms of rtn are all alike: the format tells that OUT is of another run
    other = recipe(model, out, name="c2r4")
    assert "exists: choose another output folder" in refused(capsys, 2, [*other, "--resume"])
    argv = recipe(model, out)
    for flags in (("--resume", "--dry-run"), ("--resume",)):
        with monkeypatch.context() as patched:  # it is neither learned nor written again
            patched.setattr("quantmla.learn._fit_site", stopped)
            patched.setattr(pipeline, "_write", stopped)
            capsys.readouterr()
            assert main([*argv, *flags]) == 0
    assert read(capsys)["layers_fused"] == 2
    assert before == {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert not (tmp_path / "out.work").exists()
    said = refused(capsys, 2, argv)
    assert f"an earlier output, which `quantmla verify {out}` checks" in said


def test_a_run_that_was_killed_while_it_cleaned_up_is_known_to_be_done(
    recipe, tiny_model: Tiny, tmp_path: Path, monkeypatch, capsys
):
    out, work = tmp_path / "out", tmp_path / "out.work"
    argv = recipe(tiny_model("deepseek_v3"), out)
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "empty_workdir", lambda folder: None)
        assert main(argv) == 0
    summary = read(capsys)
    shutil.copytree(work, tmp_path / "kept")
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("it is learned or written again")

    monkeypatch.setattr("quantmla.learn._fit_site", unreachable)
    monkeypatch.setattr(pipeline, "_write", unreachable)
    for change in range(100):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(tmp_path / "kept", work)
        (tmp_path / "out.old-999999999").mkdir()  # what OUT took the place of
        killed = killed_before(change, out, lambda: main([*argv, "--resume"]))
        capsys.readouterr()
        assert main([*argv, "--resume"]) == 0
        assert read(capsys) == summary
        assert {path.name for path in tmp_path.glob("out*")} == {"out", "out.yaml"}
        if not killed:
            break
    # making the folder; the trial beside it; two layers of two files, the state, the folder
    assert change >= 8
    assert before == {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    spoken = [word for word in argv if word not in ("--quiet", "--json")]
    assert main([*spoken, "--resume"]) == 0
    assert f"{out} is written: its check is all that is left to do" in capsys.readouterr().err


def test_a_run_that_was_killed_while_it_began_anew_begins_again(
    recipe, tiny_model: Tiny, tmp_path: Path, monkeypatch, capsys
):
    out, work = tmp_path / "out", tmp_path / "out.work"
    other = recipe(tiny_model("deepseek_v3"), out, name="c2r4")
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "empty_workdir", lambda folder: None)
        assert main(other) == 0
    shutil.copytree(work, tmp_path / "kept")
    shutil.copytree(out, tmp_path / "earlier")
    argv = [*recipe(tiny_model("deepseek_v3"), out), "--overwrite"]
    for change in range(100):
        for folder, left in ((work, "kept"), (out, "earlier")):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(tmp_path / left, folder)
        with monkeypatch.context() as patched:
            patched.setattr(pipeline, "_run", stopped_before_work)
            killed = killed_before(change, work, lambda: main(argv))
        if not killed:
            break
        if (work / STATE).exists():  # nothing was touched
            said = refused(capsys, 2, [*argv, "--resume"])
            assert "holds another run, with other format" in said
            assert len(list(work.iterdir())) == len(list((tmp_path / "kept").iterdir()))
            continue
        assert main([*argv, "--resume"]) == 0
        assert not work.exists()
        assert describe(format_from_json(open_source(out).config[CONFIG_KEY]["format"])) == "c4r4"
    assert change >= 6


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--overwrite",)])
def test_a_run_that_was_killed_at_any_change_of_a_file_goes_on(
    flags: tuple[str, ...], recipe, tiny_model: Tiny, tmp_path: Path, capsys
):
    model, out = tiny_model("deepseek_v3"), tmp_path / "out"
    assert main(recipe(model, tmp_path / "earlier", name="c2r4")) == 0
    assert main(recipe(model, tmp_path / "whole")) == 0
    argv = [*recipe(model, out), *flags]
    for change in range(1000):
        if flags:
            shutil.copytree(tmp_path / "earlier", out)
        killed = killed_before(change, out, lambda: main(argv))
        capsys.readouterr()
        assert main([*argv, "--resume"]) == 0, change
        assert {path.name for path in tmp_path.glob("out*")} == {"out", "out.yaml"}, change
        assert describe(format_from_json(open_source(out).config[CONFIG_KEY]["format"])) == "c4r4"
        assert_same_result(out, tmp_path / "whole")
        shutil.rmtree(out)
        if not killed:
            break
    assert change > 40


def stopped_before_work(*args: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt


def test_another_runs_output_is_not_taken_for_ones_own(
    recipe, tiny_model: Tiny, short_text: Path, tmp_path: Path, capsys
):
    model, out = tiny_model("deepseek_v3"), tmp_path / "out"
    text = tmp_path / "text.txt"
    text.write_text(short_text.read_text())
    argv = recipe(model, out, calibration={"text": str(text)})
    assert main(argv) == 0
    assert main([*argv, "--resume"]) == 0
    # rtn learns nothing from the text, so that all but the record of the run is alike
    text.write_text(short_text.read_text()[::-1])
    assert "exists: choose" in refused(capsys, 2, [*argv, "--resume"])
    text.write_text(short_text.read_text())
    for name in ("quantmla_run.json", "quantmla_log.json", FILE_NAME):
        whole = (out / name).read_bytes()
        for damaged in (b"", b"{}", b"[]", b"[5]", b'{"run": 5}', whole[:-9]):
            (out / name).write_bytes(damaged)
            assert "exists: choose" in refused(capsys, 2, [*argv, "--resume"])
        (out / name).write_bytes(whole)
    (tmp_path / "out.work").mkdir()
    (tmp_path / "out.work" / STATE).write_text('{"seed": 5}')
    assert "work holds another run" in refused(capsys, 2, [*argv, "--resume"])
    assert (tmp_path / "out.work" / STATE).exists()


def test_an_interrupt_at_the_very_end_says_that_all_is_done(
    recipe, tiny_model: Tiny, tmp_path: Path, monkeypatch, capsys
):
    def stopped(folder: Path) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    monkeypatch.setattr(pipeline, "empty_workdir", stopped)
    said = refused(capsys, 130, recipe(tiny_model("deepseek_v3"), out))
    assert f"{out} is written and checked; {out}.work can be removed" in said


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_leaves_no_output_and_resumes_to_the_same_bytes(
    stop: signal.Signals, recipe, tiny_model: Tiny, tmp_path: Path
):
    model, out, work = tiny_model("deepseek_v3"), tmp_path / "out", tmp_path / "out.work"
    argv = recipe(model, out, PAPER)
    code, shown, errors = stopped(("quantmla.learn", "_fit_site"), argv, work, stop)
    assert shown == ""
    assert list(tmp_path.glob("out*/config.json")) == []
    assert len(list(work.glob("layer_*.json"))) == 1
    if stop == signal.SIGINT:
        assert code == 130
        assert errors.startswith("quantmla: error: interrupted; finished layers are in")
        assert errors.count("\n") == 1
        assert "go on with --resume" in errors
    else:
        assert code == -stop

    assert main([*argv, "--resume"]) == 0
    assert main(recipe(model, tmp_path / "whole", PAPER)) == 0
    assert_same_result(out, tmp_path / "whole")
    assert not work.exists()


def test_progress_is_a_line_per_layer_that_counts_resumed_ones(
    recipe, tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    argv = recipe(tiny_model("deepseek_v3"), tmp_path / "out", PAPER)
    argv.remove("--quiet")

    def stop_at_the_second(message: str, show: bool) -> None:
        assert message.startswith("layer 1/2 model.layers.0.self_attn: content output error")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "say", stop_at_the_second)
        assert main(argv) == 130
    capsys.readouterr()
    assert main([*argv, "--resume"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["layer 2/2 model.layers.1.self_attn"]


def with_tensor(model: Path, out: Path, name: str, value: float) -> Path:

    shutil.copytree(model, out)

    def change(x: torch.Tensor) -> torch.Tensor:
        x.view(-1)[3] = value
        return x

    tampered(out, name, change)
    return out


@pytest.mark.parametrize(
    "name",
    [
        *(f"layers.0.self_attn.{part}.weight" for part in ("kv_b_proj", "kv_a_layernorm")),
        *("layers.0.mlp.gate_proj.weight", "norm.weight", "embed_tokens.weight"),
        "layers.1.mlp.experts.3.up_proj.weight",  # which calibration text may never reach
    ],
)
def test_weights_that_are_not_finite_are_named(
    name: str, recipe, tiny_model: Tiny, tmp_path: Path, capsys
):
    bad = with_tensor(tiny_model("deepseek_v3"), tmp_path / "bad", f"model.{name}", float("nan"))
    said = refused(capsys, 1, recipe(bad, tmp_path / "out"))
    assert f"model.{name} has 1 of" in said
    assert not (tmp_path / "out").exists()


def test_a_broken_config_is_refused_in_the_dry_run_too(
    recipe, tiny_checkpoint: Tiny, tmp_path: Path, capsys
):
    bad = rewrite_tensors(tiny_checkpoint("youtu"), tmp_path / "bad", {}, hidden_act="foo")
    for flags in ((), ("--dry-run",)):
        said = refused(capsys, 1, recipe(add_tokenizer(bad), tmp_path / "out", RTN, *flags))
        assert "hidden_act = 'foo'" in said
    assert not (tmp_path / "out.work").exists()


def test_faults_are_found_before_work_starts(recipe, tiny_model: Tiny, tmp_path: Path, capsys):
    model, out = tiny_model("deepseek_v3"), tmp_path / "out"

    def said(code: int, *args: Any, flags: tuple[str, ...] = (), **kwargs: Any) -> str:
        line = refused(capsys, code, [*recipe(model, out, *args, **kwargs), *flags])
        assert {path.name for path in tmp_path.iterdir()} == {"out.yaml"}
        return line

    assert "unknown method 'awq'; known: rtn" in said(2, {"method": "awq"})
    online = said(2, {"method": "quarot"})
    assert "method quarot cannot be fused: its rope rotation acts after RoPE" in online
    assert "has no option 'step'" in said(2, {"method": "paper", "options": {"step": 1}})
    many = {"num_sequences": 10_000}
    assert "the calibration text has 20000 tokens, but" in said(2, RTN, calibration=many)
    long = {"sequence_length": 3000, "num_sequences": 1}
    for dry in ((), ("--dry-run",)):
        line = said(2, RTN, flags=dry, calibration=long)
        assert "longer than the model's 2560 positions" in line
    away = {"device": "cuda:99"}
    assert "device 'cuda:99' is not on this machine" in said(2, RTN, calibration=away)
    assert "absent.txt" in said(2, RTN, calibration={"text": "absent.txt"})
    assert "kv_lora_rank 64 is not a multiple of group_size 48" in said(2, RTN, group_size=48)
    assert "unknown recipe key 'format.sink'" in said(2, RTN, sink=3)
    for folder in (".", "..", "/"):
        line = said(2, RTN, flags=("-o", folder, "--overwrite"))
        assert f"output folder {folder!r} has no name" in line
    assert "overlaps" in said(2, RTN, flags=("-o", str(model / "out")))
    for folder in ("/dev/null/x", "/proc/x/y", "a" * 250):
        for dry in ((), ("--dry-run",)):
            line = said(2, RTN, flags=("-o", folder, *dry))
            assert f"output {folder} cannot be written: " in line


def test_a_model_without_a_tokenizer_or_of_another_kind(
    recipe, tiny_checkpoint: Tiny, tmp_path: Path, capsys
):
    said = refused(capsys, 1, recipe(tiny_checkpoint("deepseek_v3"), tmp_path / "out"))
    assert "has no tokenizer: tokenizer.json is missing" in said
    other = tmp_path / "llama"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "llama"}')
    save_file({"x": torch.zeros(1)}, other / "model.safetensors")
    assert "no latent attention" in refused(capsys, 3, recipe(other, tmp_path / "out"))
    said = refused(capsys, 1, recipe(tmp_path / "absent", tmp_path / "out"))
    assert "no model at" in said


def test_mtp_layers_are_copied_and_named(recipe, tiny_checkpoint: Tiny, tmp_path: Path, capsys):
    tiny = open_source(tiny_checkpoint("deepseek_v3"))
    extra = {
        name.replace("layers.1.", "layers.2."): tiny.tensor(name)
        for name in tiny.names
        if "layers.1." in name
    }
    model = add_tokenizer(rewrite_tensors(tiny.path, tmp_path / "mtp", extra))
    out = tmp_path / "out"
    assert main(recipe(model, out, PAPER)) == 0
    mtp = "model.layers.2.self_attn"
    assert read(capsys)["layers_copied"] == [mtp]
    fused = open_source(out)
    entry = fused.config[CONFIG_KEY]
    assert (entry["copied_layers"], entry["ignored_layers"]) == ([mtp], [])
    for name in extra:
        assert torch.equal(fused.tensor(name), extra[name])
    assert main(["verify", str(out)]) == 0


def test_the_cache_of_the_fused_model_holds_the_transformed_rows(
    recipe, tiny_model: Tiny, tmp_path: Path
):
    """The point of it all: stock attention of the fused model caches what the method wanted."""
    from tiny import load

    from quantmla.capture.record import attentions, recording

    model, out = tiny_model("deepseek_v3"), tmp_path / "out"
    assert main(recipe(model, out, PAPER)) == 0
    (prefix, transform), *_ = transforms_from_file(out / FILE_NAME).items()
    seen = []
    for folder in (model, out):
        loaded = load(folder)
        with recording({prefix: attentions(loaded)[0]}) as taken, torch.no_grad():
            loaded(input_ids=random_tokens(), use_cache=False)
        norm = attentions(loaded)[0].kv_a_layernorm.weight.detach()
        seen.append((taken[prefix]["unit_latent"], norm))
    wanted = transform.content.apply(seen[0][0].double())
    stored = (seen[1][0] * seen[1][1]).double()
    assert relative_error(stored, wanted) < 1e-5
    assert relative_error(as_bf16(stored.float()).double(), wanted) < 2**-8


MIXED_LAYERS = {0: "c2r4", 1: {"name": "c8r8", "rope_bands": 1}}


def test_layers_of_different_formats_from_recipe_to_cache(
    tiny_model: Tiny,
    recipe: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    base, out = tiny_model("deepseek_v3"), tmp_path / "out"
    assert main(recipe(base, out, OURS, layers=MIXED_LAYERS)) == 0
    capsys.readouterr()
    found = json.loads((out / "config.json").read_text())[CONFIG_KEY]
    cache = format_from_json(found["format"])
    assert uniform_format(cache) is None
    assert [cache.for_layer(i).name for i in range(3)] == ["c2r4", "c8r8", "c4r4"]
    pages = {i: page_layout(64, 16, cache.for_layer(int(i))).page_bytes for i in found["layouts"]}
    assert {i: layout["page_bytes"] for i, layout in found["layouts"].items()} == pages
    assert len(set(pages.values())) > 1
    assert "layout" not in found

    # each layer is learned for its own widths: as a run of that format alone learns it
    alone = tmp_path / "alone"
    assert main(recipe(base, alone, OURS, name="c2r4")) == 0
    capsys.readouterr()
    mixed, uniform = (transforms_from_file(x / FILE_NAME) for x in (out, alone))
    first, second = sorted(mixed)[:2]
    assert torch.equal(mixed[first].content.rotation_RR, uniform[first].content.rotation_RR)
    assert not torch.equal(mixed[second].content.rotation_RR, uniform[second].content.rotation_RR)

    # the written recipe makes it again; the card and `inspect` say what it is
    written = load_recipe(out / "recipe.yaml")
    assert written.format.cache_format() == cache
    assert "c2r4 in layer 0; c8r8 in layer 1; c4r4 in all others" in (out / "README.md").read_text()
    assert inspect_model(str(out)).cache_format == describe(cache)
    assert main(["verify", str(out), "--json"]) == 0
    read(capsys)

    # transformers' cache stores every layer in its own format, as the evaluation reads it
    model = load_model(out, torch.float32)
    packed = QuantMLACache.from_config(model.config)
    assert [layer.fmt.name for layer in packed.layers][:2] == ["c2r4", "c8r8"]


def test_layers_that_a_model_lacks_are_refused(
    tiny_model: Tiny,
    recipe: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    argv = recipe(tiny_model("deepseek_v3"), tmp_path / "out", layers={77: "c2r4"})
    assert "77" in refused(capsys, 2, argv)
    assert not (tmp_path / "out").exists()
