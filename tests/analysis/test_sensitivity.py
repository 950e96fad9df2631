"""Sensitivity on a tiny random model: what is measured, that it is kept, and the plan from it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantmla import learn
from quantmla.analysis import sensitivity
from quantmla.analysis.protocol import Protocol
from quantmla.analysis.sensitivity import composed, measure, one_path, planned_format
from quantmla.analysis.subject import ModelSubject
from quantmla.arch import adapter_for
from quantmla.capture.tokens import read_text
from quantmla.checkpoint.source import open_source
from quantmla.cli import main
from quantmla.errors import QuantMLAError
from quantmla.method.quantmla import Options
from quantmla.pipeline import quantize
from quantmla.quant.format import parse_format
from quantmla.quant.mixed import distinct_formats, uniform_format
from quantmla.recipe import load_recipe, with_changes
from quantmla.transform.layer import identity

SHORT = Protocol(draws=1, sequences=2, length=96)
BUDGET = 44.0  # c3r4 in the tiny model's sizes, 64 and 16 channels


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(steps=2, polish_steps=0, rope_steps=2, gram_sequences=1, probes=1)
    monkeypatch.setattr(sensitivity, "FEW_STEPS", options)
    monkeypatch.setattr(sensitivity, "TRAIN_WINDOWS", 2)
    monkeypatch.setattr(sensitivity, "HELD_OUT_WINDOWS", 1)


@pytest.fixture
def subject(tiny_model: Callable[[str], Path], short_text: Path, tmp_path: Path) -> ModelSubject:
    source = open_source(tiny_model("deepseek_v3"))
    return ModelSubject(
        source=source,
        adapter=adapter_for(source.config),
        device="cpu",
        texts=[("short.txt", read_text(short_text))],
        layers=[],
        budget=BUDGET,
        workdir=tmp_path,
        report=lambda stage, done, total: None,
    )


def test_costs_and_plan_and_what_is_kept(subject, monkeypatch):
    found = measure(subject, SHORT)
    costs = {(row["layer"], row["path"], row["bits"]): row["cost"] for row in found["costs"]}
    assert len(costs) == 2 * 2 * 4
    for layer in (0, 1):
        for path in ("content", "rope"):
            two, four, eight = (costs[layer, path, bits] for bits in (2, 4, 8))
            assert two > 3 * four > 9 * eight > 0  # steps shrink 5 and 17 times, errors by squares
    plan = found["plan"]
    assert plan["bytes_per_token"] <= BUDGET
    assert plan["best_uniform"]["bytes_per_token"] <= BUDGET
    assert plan["predicted_kl"] <= plan["best_uniform"]["predicted_kl"]
    cells = [(int(i), parse_format(name)) for i, name in plan["formats"].items()]
    total = sum(
        costs.get((i, path, bits), 0.0)
        for i, fmt in cells
        for path, bits in (("content", fmt.content_bits), ("rope", fmt.rope_bits))
    )
    assert plan["predicted_kl"] == pytest.approx(total)
    # errors add up while they are small: not one path counts twice, none is left out
    assert plan["measured_kl"] == pytest.approx(total, rel=0.5)

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a finished part is made again")

    monkeypatch.setattr(sensitivity, "learn_checkpoint", unreachable)
    assert measure(subject, SHORT) == found


def test_a_stopped_fit_goes_on_after_its_last_layer(subject, monkeypatch):
    fit_site, fitted = learn._fit_site, []

    def stopping(source, adapter, site, *rest):
        fitted.append(site.cache_index)
        if len(fitted) == 4:  # the second layer of the second width
            raise KeyboardInterrupt
        return fit_site(source, adapter, site, *rest)

    monkeypatch.setattr(learn, "_fit_site", stopping)
    with pytest.raises(KeyboardInterrupt):
        measure(subject, SHORT)
    assert fitted == [0, 1, 0, 1]
    found = measure(subject, SHORT)
    assert fitted[4:] == [1, 0, 1]  # the rest of the second width, and the third
    left = {path.name for path in subject.workdir.iterdir()}
    widths, kinds = ("c2r2", "c3r3", "c4r4"), ("json", "safetensors")
    assert left == {f"sensitivity_{n}.{kind}" for n in widths for kind in kinds} | {
        f"sensitivity_{i:04d}.json" for i in (0, 1)
    }
    whole = subject.workdir / "whole"
    whole.mkdir()
    assert measure(replace(subject, workdir=whole), SHORT) == found


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("sensitivity_0001.json", lambda text: text.replace(b'"kl"', b'"lk"', 1)),
        ("sensitivity_0001.json", lambda text: b"[{}]"),
        ("sensitivity_0001.json", lambda text: b"5"),
        ("sensitivity_c3r3.json", lambda text: b"{}"),
        ("sensitivity_c3r3.safetensors", lambda data: data[:-8] + b"\0" * 8),
    ],
)
def test_a_part_that_was_changed_is_named(name: str, change, subject):
    measure(subject, SHORT)
    path = subject.workdir / name
    path.write_bytes(change(path.read_bytes()))
    named = path.with_suffix(".json")
    with pytest.raises(QuantMLAError, match=f"{named} is damaged or has been changed: remove"):
        measure(subject, SHORT)
    named.unlink()  # as it says
    measure(subject, SHORT)


def test_a_cell_quantises_one_path_of_one_layer():
    fmt = one_path(3, "rope", 2)
    assert fmt.for_layer(3).name == "c16r2"
    assert {fmt.for_layer(i).name for i in (0, 2, 4)} == {"c16r16"}
    assert one_path(0, "content", 4).for_layer(0).name == "c4r16"
    assert all(one.recent_window is None for one in distinct_formats(fmt))


def test_each_path_takes_the_transform_of_its_own_width():
    fits = {}
    for bits in (2, 3, 4):
        plain = identity(torch.full((8,), float(bits)), 2)
        fits[bits] = {
            0: plain._replace(rope=type(plain.rope)(torch.zeros(2), torch.ones(2) * bits))
        }
    both = composed(fits, 0, parse_format("c2r8", group_size=8))
    assert both.content.scale_R[0] == 2
    assert both.rope.gain_F[0] == 4  # wider than any that is learned: the widest


def test_a_plan_is_a_cache_format():
    assert uniform_format(planned_format({0: "c2r4", 1: "c2r4"})) == parse_format("c2r4")
    mixed = planned_format({0: "c2r4", 1: "c8r8", 2: "c2r4"})
    assert [mixed.for_layer(i).name for i in range(3)] == ["c2r4", "c8r8", "c2r4"]


def analyze(model: Path, out: Path, text: Path, *flags: str) -> int:
    argv = ["analyze", str(model), "-o", str(out), "--text", str(text), "--device", "cpu"]
    return main([*argv, "--preset", "quick", *flags])


def test_analyze_writes_a_plan_that_quantize_takes(tiny_model, short_text, tmp_path, capsys):
    model, out = tiny_model("deepseek_v3"), tmp_path / "analysis"
    flags = ["--studies", "sensitivity", "--budget", str(BUDGET)]
    assert analyze(model, out, short_text, *flags) == 0
    said = capsys.readouterr()
    plan = json.loads((out / "analysis.json").read_text())["model_studies"]["sensitivity"]["plan"]
    assert str(out / "bit_plan.yaml") in said.out
    assert f"{plan['measured_kl']:.4g}" in said.out
    assert f"{plan['best_uniform']['measured_kl']:.4g}" in said.out
    stages = ["transforms for 2 bits", "transforms for 4 bits", "sensitivity by layer"]
    assert [line for line in said.err.splitlines() if line in stages] == stages
    recipe = load_recipe(out / "bit_plan.yaml")
    assert recipe.calibration.text == str(short_text)
    asked = {"output.folder": str(tmp_path / "out"), "transform.method": "rtn"}
    quantize(
        with_changes(recipe, asked), resume=False, dry_run=False, overwrite=False, progress=False
    )
    assert (tmp_path / "out" / "config.json").is_file()
    assert analyze(tmp_path / "out", tmp_path / "again", short_text, *flags) == 2
    assert "plan with the original" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--budget", "20"], "budget 20 bytes per token is less"),
        (["--budget", "160"], "leaves nothing to plan: bf16 takes 160"),
        (["--budget", "44", "--studies", "bound"], "needs the study sensitivity"),
        (["--budget", "x"], "--budget"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_refused_at_once(
    flags, words, tiny_model, short_text, tmp_path, capsys
):
    out = tmp_path / "analysis"
    assert analyze(tiny_model("deepseek_v3"), out, short_text, *flags) == 2
    assert words in capsys.readouterr().err
    assert not out.exists()
