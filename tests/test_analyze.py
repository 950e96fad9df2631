"""`quantmla analyze` on tiny models: the file, resuming, and what is refused."""

import contextlib
import json
import shutil
import signal
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from held import stopped
from killed import killed_before

from quantmla import analyze as stage
from quantmla.analysis import LAYER_STUDIES
from quantmla.analysis.protocol import PRESETS, Protocol
from quantmla.analysis.subject import ModelSubject
from quantmla.analyze import analyze, generator
from quantmla.cli import main
from quantmla.errors import QuantMLAError, UnsupportedModel, UsageError
from quantmla.recipe import AnalysisRequest

Tiny = Callable[[str], Path]
TIMES = ("seconds", "cpu_seconds", "layer_seconds", "layer_cpu_seconds")
SMALL = Protocol(
    draws=1, sequences=2, length=70, batch_size=2, group_size=16, repetitions=2, resamples=20
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "default", SMALL)


def request(model: Path, out: Path, text: Path, **changes: Any) -> AnalysisRequest:
    given = {"texts": (str(text), str(text)), "device": "cpu"} | changes
    return AnalysisRequest(model=str(model), output=str(out), **given)


def timeless(found: Any) -> Any:
    """Without what depends on the machine's speed."""
    if isinstance(found, dict):
        kept = {k: v for k, v in found.items() if k not in TIMES}
        return {key: timeless(value) for key, value in kept.items()}
    return [timeless(entry) for entry in found] if isinstance(found, list) else found


def read(out: Path) -> dict[str, Any]:
    return json.loads((out / "analysis.json").read_text())


def test_the_file_holds_every_study_of_every_layer(
    tiny_model: Tiny, short_text: Path, tmp_path: Path
):
    out = tmp_path / "new" / "out"
    headline = analyze(request(tiny_model("deepseek_v3"), out, short_text), progress=False)
    found = read(out)
    assert set(found["summary"]) == set(LAYER_STUDIES)
    assert [layer["layer"] for layer in found["layers"]] == [0, 1]
    for layer in found["layers"]:
        assert set(LAYER_STUDIES) < set(layer)
        assert len(layer["gain"]["points"]) == 2  # one of each cell
        assert len(layer["matched_error"]["by_sequence"]["rope"]) == 4
    assert found["bound_violations"] == 0
    assert found["rope_content_ratio"] == found["summary"]["matched_error"]["ratio"] > 0
    low, high = found["rope_content_ratio_interval"]
    assert low <= found["rope_content_ratio"] <= high
    assert found["protocol"]["length"] == 70
    assert headline["output"] == str(out / "analysis.json")
    assert [p.name for p in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("case", ["longcat_flash", "kimi_linear", "deepseek_v2"])
def test_families_with_more_or_fewer_attentions_than_layers(
    case: str, tiny_model: Tiny, short_text: Path, tmp_path: Path
):
    studies = {"studies": ("matched_error", "bound")}
    analyze(request(tiny_model(case), tmp_path / "out", short_text, **studies), progress=False)
    found = read(tmp_path / "out")
    indices = [layer["cache_index"] for layer in found["layers"]]
    assert indices == sorted(indices)
    assert len(set(indices)) == len(indices) > 0
    assert set(found["summary"]) == {"matched_error", "bound"}
    assert found["predictor_spearman"] is None


def test_what_quantize_wrote_is_studied_in_its_own_coordinates(
    tiny_model: Tiny, short_text: Path, tmp_path: Path
):
    model, fused = tiny_model("deepseek_v3"), tmp_path / "fused"
    argv = ["quantize", str(model), "-o", str(fused), "--text", str(short_text), "--quiet"]
    argv += ["--num-sequences", "2", "--sequence-length", "128", "--device", "cpu"]
    found = []
    for method in ("rtn", "smoothquant"):
        assert main([*argv, "--method", method, "--overwrite"]) == 0
        only = {"studies": ("matched_error",), "overwrite": True}
        for folder in (model, fused):
            analyze(request(folder, tmp_path / "out", short_text, **only), progress=False)
            found.append(
                [layer["matched_error"]["content"] for layer in read(tmp_path / "out")["layers"]]
            )
    original, as_it_is, again, scaled = found
    # the identity was folded; float32 weights are stored as they were
    assert as_it_is == pytest.approx(original, rel=1e-4)
    assert original == again
    assert scaled != pytest.approx(original, rel=1e-2)


def test_an_interrupted_run_goes_on_to_the_same_figures(
    tiny_model: Tiny, short_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, studies = tiny_model("deepseek_v3"), ("interventions", "gain")
    whole = request(model, tmp_path / "whole", short_text, studies=studies)
    analyze(whole, progress=False)
    out, made = tmp_path / "out", []
    real = stage._layer

    def second_is_interrupted(*args: Any) -> dict[str, Any]:
        if made:
            raise KeyboardInterrupt
        made.append(1)
        return real(*args)

    stopped = request(model, out, short_text, studies=studies)
    with monkeypatch.context() as patched:
        patched.setattr(stage, "_layer", second_is_interrupted)
        with pytest.raises(KeyboardInterrupt, match="go on with --resume"):
            analyze(stopped, progress=False)
    assert not out.exists()
    assert len(list(tmp_path.glob("out.work/layer_*.json"))) == 1
    with pytest.raises(UsageError, match="unfinished run: go on with --resume"):
        analyze(stopped, progress=False)
    other = request(model, out, short_text, studies=("gain",), resume=True)
    with pytest.raises(UsageError, match="another run, with other studies"):
        analyze(other, progress=False)
    again = request(model, out, short_text, studies=studies, resume=True)
    analyze(again, progress=False)
    assert timeless(read(out)) == timeless(read(tmp_path / "whole"))
    assert not (tmp_path / "out.work").exists()


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_stopped_process_leaves_no_output_and_resumes(
    stop: signal.Signals, tiny_model: Tiny, short_text: Path, tmp_path: Path
):
    out, work = tmp_path / "out", tmp_path / "out.work"
    argv = ["analyze", str(tiny_model("deepseek_v3")), "-o", str(out), "--preset", "quick"]
    argv += ["--text", str(short_text), "--device", "cpu", "--studies", "matched_error,gain"]
    code, _, said = stopped(("quantmla.analyze", "_layer"), argv, work, stop)
    assert code == (-signal.SIGKILL if stop == signal.SIGKILL else 128 + stop)
    assert not out.exists()
    if stop != signal.SIGKILL:
        assert said.splitlines()[-1].endswith("go on with --resume")
        assert "Traceback" not in said
    assert main([*argv, "--resume", "--quiet"]) == 0
    assert len(read(out)["layers"]) == 2
    assert not work.exists()


def test_an_error_that_an_interrupt_leads_to_says_how_to_go_on(
    tiny_model: Tiny, short_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """safetensors fails with a ValueError where Ctrl-C comes in its call into torch."""

    def fails(*_: Any) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise ValueError("could not determine the shape")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr("quantmla.analyze._layer", fails)
    argv = ["analyze", str(tiny_model("deepseek_v3")), "-o", str(tmp_path / "out"), "--preset"]
    argv += ["quick", "--text", str(short_text), "--device", "cpu", "--studies", "gain", "--quiet"]
    try:
        assert main(argv) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.endswith("go on with --resume\n")


def test_results_are_replaced_only_when_asked(tiny_model: Tiny, short_text: Path, tmp_path: Path):
    model, only = tiny_model("deepseek_v3"), {"studies": ("bound",)}
    analyze(request(model, tmp_path, short_text, **only), progress=False)
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(UsageError, match="exists: choose another folder"):
        analyze(request(model, tmp_path, short_text, **only), progress=False)
    analyze(request(model, tmp_path, short_text, **only, overwrite=True), progress=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["analysis.json", "mine.txt"]


def test_a_bit_plan_is_replaced_only_when_asked(tiny_model: Tiny, short_text: Path, tmp_path: Path):
    (tmp_path / "bit_plan.yaml").write_text("mine")
    with pytest.raises(UsageError, match=r"bit_plan\.yaml exists: choose another folder"):
        analyze(
            request(tiny_model("deepseek_v3"), tmp_path, short_text, budget=64.0), progress=False
        )
    assert [p.name for p in tmp_path.iterdir()] == ["bit_plan.yaml"]


def test_an_interrupt_at_the_very_end_says_that_all_is_done(
    tiny_model: Tiny, short_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def stopped(folder: Path) -> None:
        raise KeyboardInterrupt

    asked = request(tiny_model("deepseek_v3"), tmp_path / "out", short_text, studies=("bound",))
    monkeypatch.setattr(stage, "empty_workdir", stopped)
    with pytest.raises(KeyboardInterrupt, match=r"analysis\.json is written; .* can be removed"):
        analyze(asked, progress=False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"preset": "huge"}, "unknown preset 'huge'; known: default, paper, quick"),
        ({"studies": ("gane",)}, "unknown study 'gane'; known: matched_error, gain"),
        ({"texts": ("absent.txt",)}, "no text file at 'absent.txt'"),
        ({"device": "abacus"}, "'abacus'"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_work(
    changes: dict[str, Any], words: str, tiny_model: Tiny, short_text: Path, tmp_path: Path
):
    asked = request(tiny_model("deepseek_v3"), tmp_path / "out", short_text, **changes)
    with pytest.raises(QuantMLAError, match=words):
        analyze(asked, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_text_that_is_too_short_is_named(tiny_model: Tiny, tmp_path: Path):
    text = tmp_path / "note.txt"
    text.write_text("x" * 130)
    with pytest.raises(UsageError, match=r"text note\.txt: .* 130 tokens, but 140 are needed"):
        analyze(request(tiny_model("deepseek_v3"), tmp_path / "out", text), progress=False)


def test_a_text_of_one_token_is_named(tiny_model: Tiny, tmp_path: Path):
    text = tmp_path / "note.txt"
    text.write_text("x" * 1000)
    with pytest.raises(UsageError, match=r"text note\.txt repeats one token through a window"):
        analyze(request(tiny_model("deepseek_v3"), tmp_path / "out", text), progress=False)
    assert list(tmp_path.iterdir()) == [text]


def test_folders_that_cannot_be_meant(tiny_model: Tiny, short_text: Path, tmp_path: Path):
    model = tiny_model("deepseek_v3")
    (tmp_path / "file").write_text("x")
    for name, words in (
        ("..", "has no name"),
        ("file", "may be written to"),
        ("file/x", "output .*x cannot be written: Not a directory"),
        ("a\0b", "has no name"),
    ):
        with pytest.raises(UsageError, match=words):
            analyze(request(model, tmp_path / name, short_text), progress=False)


def test_a_model_without_a_rope_path_is_refused(
    tiny_model: Tiny, short_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from quantmla.arch.adapter import Adapter

    real = Adapter.geometry
    monkeypatch.setattr(
        Adapter, "geometry", lambda self, config: replace(real(self, config), qk_rope_head_dim=0)
    )
    with pytest.raises(UnsupportedModel, match="has no rope path"):
        analyze(request(tiny_model("deepseek_v3"), tmp_path / "o", short_text), progress=False)


def test_a_run_that_was_killed_at_its_end_is_known_to_be_done(
    tiny_model: Tiny, short_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out, work = tmp_path / "out", tmp_path / "out.work"
    asked = request(tiny_model("deepseek_v3"), out, short_text, studies=("bound", "gain"))
    with monkeypatch.context() as patched:
        patched.setattr(stage, "empty_workdir", lambda folder: None)
        analyze(asked, progress=False)
    shutil.copytree(work, tmp_path / "kept")
    written = (out / "analysis.json").read_bytes()
    again = replace(asked, resume=True)
    said = []
    for change in range(100):
        for absent in (False, True) if change == 0 else (False,):  # killed before the file
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(tmp_path / "kept", work)
            if absent:
                (out / "analysis.json").unlink()
            killed = killed_before(change, tmp_path / "out", lambda: analyze(again, progress=False))
            said.append(analyze(again, progress=False))
            assert timeless(read(out)) == timeless(json.loads(written))
            assert not work.exists()
        if not killed:
            break
    assert change >= 6
    assert all(timeless(found) == timeless(said[0]) for found in said)


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_that_was_killed_at_any_change_of_a_file_goes_on(
    overwrite: bool, tiny_model: Tiny, short_text: Path, tmp_path: Path
):
    out, model = tmp_path / "out", tiny_model("deepseek_v3")
    asked = request(model, out, short_text, studies=("bound",), overwrite=overwrite)
    other = replace(asked, studies=("gain",), output=str(tmp_path / "earlier"))
    analyze(other, progress=False)
    analyze(replace(asked, output=str(tmp_path / "whole")), progress=False)
    for change in range(200):
        if overwrite:
            shutil.copytree(tmp_path / "earlier", out)
        killed = killed_before(change, out, lambda: analyze(asked, progress=False))
        analyze(replace(asked, resume=True), progress=False)
        assert timeless(read(out)) == timeless(read(tmp_path / "whole")), change
        assert [path.name for path in tmp_path.glob("out*")] == ["out"]
        shutil.rmtree(out)
        if not killed:
            break
    assert change > 20


def test_another_runs_result_is_not_taken_for_ones_own(
    tiny_model: Tiny, short_text: Path, tmp_path: Path
):
    out = tmp_path / "out"
    asked = request(tiny_model("deepseek_v3"), out, short_text, studies=("bound",), resume=True)
    analyze(asked, progress=False)
    analyze(asked, progress=False)
    text = tmp_path / "other.txt"
    text.write_text(short_text.read_text()[::-1])
    others = ({"studies": ("gain",)}, {"texts": (str(text),)}, {"preset": "quick"})
    for change in others:
        with pytest.raises(UsageError, match=r"analysis\.json exists: choose another folder"):
            analyze(replace(asked, **change), progress=False)
    whole = (out / "analysis.json").read_text()
    for damaged in ("", "5", "{}", whole.replace('"bound"', '"dnuob"'), whole[:-9]):
        (out / "analysis.json").write_text(damaged)
        with pytest.raises(UsageError, match=r"analysis\.json exists: choose another folder"):
            analyze(asked, progress=False)


def edited(path: Path) -> Iterator[str]:
    """A work file's JSON with each key of its content left out or of another type."""
    whole = json.loads(path.read_text())
    yield from ("", "7", "[]", '{"prefix": "x"}')
    for key in whole["content"]:
        rest = {name: value for name, value in whole["content"].items() if name != key}
        for content in (rest, rest | {key: "x"}, rest | {key: {}}):
            yield json.dumps(whole | {"content": content})


def test_a_layer_that_was_damaged_or_edited_is_named(
    tiny_model: Tiny, short_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = request(tiny_model("deepseek_v3"), tmp_path / "out", short_text, studies=("bound",))

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(stage, "_report", stop)
        with pytest.raises(KeyboardInterrupt):
            analyze(asked, progress=False)
    path = tmp_path / "out.work" / "layer_0001.json"
    again = replace(asked, resume=True)
    for content in edited(path):
        path.write_text(content)
        with pytest.raises(QuantMLAError, match=r"layer_0001.json is damaged .* remove this file"):
            analyze(again, progress=False)
    path.unlink()  # as it says
    assert analyze(again, progress=False)["layers"] == 2


def test_a_study_of_the_model_runs_once_after_the_layers(
    tiny_model: Tiny, short_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fake, seen = types.ModuleType("fake_study"), []

    def measure(model: ModelSubject, protocol: Protocol) -> dict[str, Any]:
        seen.append((len(model.layers), [name for name, _ in model.texts]))
        return {"plan": protocol.length}

    fake.measure, fake.check = measure, lambda run: None
    monkeypatch.setitem(sys.modules, "fake_study", fake)
    monkeypatch.setitem(stage.MODEL_STUDIES, "fake", "fake_study")
    given = {"studies": ("bound", "fake")}
    asked = request(tiny_model("deepseek_v3"), tmp_path / "out", short_text, **given)

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(stage, "_report", stop)
        with pytest.raises(KeyboardInterrupt):
            analyze(asked, progress=False)
    said = analyze(replace(asked, resume=True), progress=False)
    assert seen == [(2, [short_text.name] * 2)]
    assert said["layers"] == 2
    assert read(tmp_path / "out")["model_studies"] == {"fake": {"plan": 70}}
    alone = replace(asked, studies=("fake",), overwrite=True)
    assert "layers" not in analyze(alone, progress=False)  # none was studied


def test_random_numbers_are_those_of_seed_layer_and_study():
    def first(*key: Any) -> int:
        return int(torch.randint(0, 2**31, (1,), generator=generator(*key, torch.device("cpu"))))

    keys = [(0, 1, "gain"), (0, 2, "gain"), (1, 1, "gain"), (0, 1, "bound")]
    assert len({first(*key) for key in keys}) == 4
    assert first(*keys[0]) == first(*keys[0])
