"""`eval` on tiny checkpoints: which rows there are, and that they compare like with like."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantmla import evaluation, pipeline
from quantmla.cli import main
from quantmla.errors import QuantMLAError, UnsupportedModel, UsageError
from quantmla.evaluation import Needles, evaluate, published
from quantmla.method import paper, smoothquant
from quantmla.quant.format import parse_format
from quantmla.recipe import EvaluationRequest

pytestmark = pytest.mark.usefixtures("read_short")
Tiny = Callable[[str], Path]
KEYS = ["method", "format", "sinks", "recent", "perplexity", "kl_mean", "kl_p99", "kl_max"]
KEYS += ["top1", "recall", "tokens", "bytes_per_token", "by_context"]


@pytest.fixture(scope="module")
def fused(tiny_model: Tiny, short_text: Path, tmp_path_factory) -> Path:
    """A deepseek_v3 fused by a short run of the paper's method; not to be modified."""
    out = tmp_path_factory.mktemp("fused") / "out"
    recipe = out.parent / "recipe.yaml"
    recipe.write_text(
        "format: {group_size: 16, sinks: 2, recent: 64}\n"
        "transform: {method: paper, options: {steps: 3, batch_size: 2}}\n"
        "calibration: {held_out_sequences: 2, num_sequences: 3, sequence_length: 64}\n"
    )
    argv = ["quantize", str(tiny_model("deepseek_v3")), "-o", str(out), "--quiet"]
    assert main([*argv, "--recipe", str(recipe), "--text", str(short_text)]) == 0
    return out


@pytest.fixture
def run(short_text: Path):
    def rows(model: Path | str, needles: int = 0, **given: Any) -> list[dict[str, Any]]:
        request = EvaluationRequest(
            model=str(model),
            **{"text": str(short_text), "context": 300, "limit": 1, "device": "cpu"} | given,
        )
        return [
            dict(row) for row in evaluate(request, progress=False, needles=Needles(needles, 1536))
        ]

    return rows


def test_rows_of_a_fused_folder(fused: Path, run):
    rows = run(fused, methods=("rtn", "quarot"))
    assert [list(row) for row in rows] == [KEYS] * 4
    assert [row["method"] for row in rows] == ["bf16", "rtn", "quarot", "paper-fused"]
    base, *others = rows
    assert (base["format"], base["kl_mean"], base["kl_p99"], base["top1"]) == ("bf16", 0, 0, 1)
    assert base["bytes_per_token"] == 2 * (64 + 16)
    for row in others:
        assert (row["format"], row["sinks"], row["recent"]) == ("c4r4", 2, 64)  # as recorded
        assert row["kl_mean"] > 0
        assert 0 < row["top1"] <= 1
        assert row["bytes_per_token"] < base["bytes_per_token"]
        assert row["perplexity"] == pytest.approx(base["perplexity"], rel=0.1)
        assert row["kl_mean"] < row["kl_p99"] <= row["kl_max"]
        parts = row["by_context"]
        assert [(p["first"], p["end"]) for p in parts] == [
            (0, 64),
            (64, 128),
            (128, 256),
            (256, 299),
        ]
        assert sum(p["tokens"] for p in parts) == row["tokens"]
        assert max(p["kl_max"] for p in parts) == row["kl_max"]
        whole = sum(p["kl_mean"] * p["tokens"] for p in parts) / row["tokens"]
        assert whole == pytest.approx(row["kl_mean"])
    assert {row["tokens"] for row in rows} == {299}
    assert {row["recall"] for row in rows} == {None}


def test_a_16_bit_cache_agrees_up_to_bf16(fused: Path, run):
    four, sixteen = (run(fused, methods=("rtn",), format=name) for name in ("c4r4", "c16r16"))
    for low, high in zip(four[1:], sixteen[1:], strict=True):
        assert high["format"] == "c16r16"
        assert high["kl_mean"] < low["kl_mean"] / 100
        assert high["top1"] > 0.98
        assert high["bytes_per_token"] == 2 * (64 + 16)


def test_protection_is_that_of_the_request_for_every_row(fused: Path, run):
    rows = run(fused, methods=("rtn",), sinks=1, recent=128)
    assert {(row["sinks"], row["recent"]) for row in rows[1:]} == {(1, 128)}
    bare = run(fused, methods=("rtn",), unprotected=True)
    assert {(row["sinks"], row["recent"]) for row in bare[1:]} == {(0, None)}
    for protected, unprotected in zip(rows[1:], bare[1:], strict=True):
        assert protected["kl_mean"] < unprotected["kl_mean"]


def test_a_window_as_long_as_the_text_leaves_nothing_quantised(fused: Path, run):
    for row in run(fused, methods=("rtn",), recent=4096)[1:]:
        assert row["kl_mean"] < 1e-4  # rounding to bf16 remains


def test_a_fused_folder_is_measured_as_its_simulation_is(
    fused: Path, run, monkeypatch: pytest.MonkeyPatch
):
    """The same transforms on the base model give what the fused weights give."""
    from quantmla.transform.store import FILE_NAME, transforms_from_file

    transforms = transforms_from_file(fused / FILE_NAME)
    monkeypatch.setattr(evaluation, "fit", lambda *args: transforms)
    monkeypatch.setattr(evaluation, "published", lambda fmt: fmt)
    _, simulated, stored = run(fused, methods=("smoothquant",))  # any name: it is not fitted
    # rows differ by float32 rounding, which turns single bf16 values and codes
    assert stored["kl_mean"] == pytest.approx(simulated["kl_mean"], rel=0.05)
    assert stored["perplexity"] == pytest.approx(simulated["perplexity"], rel=1e-3)


def test_no_two_rows_have_one_name(fused: Path, run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evaluation, "fit", lambda *args: {})
    names = ["rtn", "smoothquant", "quarot", "paper", "identity"]
    rows = run(fused)  # of `paper`, which is a baseline too, in another quantiser
    assert [row["method"] for row in rows] == ["bf16", *names, "paper-fused"]


def test_a_row_of_the_folder_s_own_name_is_refused(
    fused: Path, run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(evaluation, "published", lambda fmt: fmt)  # one quantiser for all
    with pytest.raises(UsageError, match="--methods names paper, which the folder itself is of"):
        run(fused, methods=("rtn", "paper"))


def test_recall_is_a_share_of_needles(fused: Path, run):
    rows = run(fused, needles=1, methods=("rtn",))
    assert all(0 <= row["recall"] <= 1 for row in rows)  # a random model recalls nothing


def test_an_unfused_model_is_compared_with_itself_under_every_method(
    tiny_model: Tiny, run, monkeypatch: pytest.MonkeyPatch
):
    fitted = []

    def fit(source, adapter, name, fmt, device, progress):
        fitted.append((name, fmt.range_rule))
        return {}

    monkeypatch.setattr(evaluation, "fit", fit)
    rows = run(tiny_model("deepseek_v3"))
    names = ["rtn", "smoothquant", "quarot", "paper", "identity", "quantmla"]
    assert [row["method"] for row in rows] == ["bf16", *names]
    # the published methods in the published quantiser, ours in our own
    assert fitted == [(n, "paper") for n in names[:4]] + [(n, "hold_zero") for n in names[4:]]


@pytest.mark.parametrize("method", [smoothquant, paper])
def test_methods_are_fitted_with_their_own_amounts(
    method, tiny_model: Tiny, run, monkeypatch: pytest.MonkeyPatch
):
    amounts = {"num_sequences": 3, "held_out_sequences": 2, "sequence_length": 80}
    monkeypatch.setattr(method, "CALIBRATION", amounts)
    if method is paper:
        monkeypatch.setattr(paper, "Options", lambda: replace(PAPER_OPTIONS, steps=2))
    seen = []
    learn = evaluation.learn_checkpoint

    def watch(source, adapter, tokens, *args, **kwargs):
        seen.append((tuple(tokens.train_BS.shape), tuple(tokens.held_out_BS.shape)))
        return learn(source, adapter, tokens, *args, **kwargs)

    monkeypatch.setattr(evaluation, "learn_checkpoint", watch)
    name = method.__name__.rpartition(".")[2]
    _, row = run(tiny_model("deepseek_v3"), methods=(name,))
    assert row["method"] == name
    assert seen == [((3, 80), (2, 80))]


PAPER_OPTIONS = paper.Options()


def test_the_published_quantiser_keeps_groups_pages_and_protection():
    ours = parse_format("c2r4", group_size=32, num_sink_tokens=1, recent_window=64)
    found = published(ours)
    same = ("content_bits", "rope_bits", "group_size", "page_size", "num_sink_tokens")
    for name in (*same, "recent_window"):
        assert getattr(found, name) == getattr(ours, name)
    assert (found.range_rule, found.rope_bands, found.rope_centring) == ("paper", 1, "none")
    assert (found.content_clip, found.rope_clip) == (1.0, 1.0)
    assert published(ours.unprotected()).recent_window is None


def test_packaged_fits_are_for_the_usual_groups_only(
    fused: Path, run, monkeypatch: pytest.MonkeyPatch
):
    """They were learned in groups of 64: this folder's are of 16."""

    def packaged(*args):
        raise AssertionError("asked for a packaged fit")

    monkeypatch.setattr(evaluation, "packaged_fit", packaged)
    assert len(run(fused, methods=("rtn",))) == 3
    with pytest.raises(AssertionError, match="asked for"):
        run(fused, methods=("rtn",), format="c4r4")


def test_what_cannot_be_compared_is_refused(fused: Path, tiny_model: Tiny, tmp_path: Path, run):
    base = tiny_model("deepseek_v3")
    with pytest.raises(QuantMLAError, match=r"is not the checkpoint that .* their hashes differ"):
        run(fused, baseline=str(tiny_model("youtu")))
    with pytest.raises(QuantMLAError, match="no model at ''"):
        run(fused, baseline="")
    with pytest.raises(UsageError, match="it is its own baseline"):
        run(base, baseline=str(fused))
    with pytest.raises(UsageError, match="unknown method 'awq'"):
        run(fused, methods=("awq",))
    with pytest.raises(UsageError, match="--methods names rtn twice"):
        run(fused, methods=("rtn", "quarot", "rtn"))
    with pytest.raises(UsageError, match="device 'cuda:99'"):
        run(fused, device="cuda:99")
    with pytest.raises(UsageError, match="unknown cache format 'c5r4'"):
        run(fused, format="c5r4")
    with pytest.raises(UsageError, match="no text file"):
        run(fused, text=str(tmp_path / "absent.txt"))


def test_from_the_command_line(fused: Path, short_text: Path, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setitem(evaluate.__kwdefaults__, "needles", Needles(1, 1536))
    path = tmp_path / "rows.json"
    argv = ["eval", str(fused), "--methods", "rtn", "--context", "128", "--limit", "2"]
    argv += ["--text", str(short_text), "--device", "cpu", "--json", str(path)]
    assert main(argv) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["method"] for row in rows] == ["bf16", "rtn", "paper-fused"]
    assert [list(row) for row in rows] == [KEYS] * 3
    assert rows[0]["tokens"] == 2 * 127
    shown = capsys.readouterr().out
    assert "kl_mean" in shown
    assert f"{rows[2]['kl_mean']:.4g}" in shown


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"context": 100_000}, "context 100000 is more than the model's 2560 positions"),
        ({"text": "short"}, "the text has 8 tokens"),
        ({"needles": 1, "text": "needle"}, "usable words for keys"),
        ({"format": "c4r4", "model": "longcat_flash"}, "not a multiple of group_size 64"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_a_fit(
    given: dict, words: str, run, tiny_model: Tiny, tmp_path: Path, monkeypatch
):
    def fitted(*args: Any) -> None:
        raise AssertionError("a method was fitted")

    monkeypatch.setattr(evaluation, "fitted_variant", fitted)
    (tmp_path / "short.txt").write_text("hi there")
    (tmp_path / "needle.txt").write_text("some words to hide a needle in " * 20)
    if "text" in given:
        given = given | {"text": str(tmp_path / f"{given['text']}.txt")}
    model = tiny_model(given.get("model", "deepseek_v3"))
    rest = {key: value for key, value in given.items() if key != "model"}
    fault = UnsupportedModel if "model" in given else UsageError
    with pytest.raises(fault, match=words):
        run(model, methods=("rtn",), **rest)


@pytest.mark.parametrize("value", [{}, 5, {"base_model": None}, {"version": 2}, {"format": {}}])
def test_a_damaged_manifest_is_one_sentence(value, fused: Path, run, tmp_path: Path):
    out = tmp_path / "out"
    shutil.copytree(fused, out)
    config = json.loads((out / "config.json").read_text())
    changed = config["quantmla_config"] | value if isinstance(value, dict) and value else value
    config["quantmla_config"] = changed
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuantMLAError, match="quantmla_config in"):
        run(out, methods=("rtn",))
    with pytest.raises(QuantMLAError, match="quantmla_config in"):
        pipeline.verify(str(out), against=None)


def test_a_mixed_folder_is_measured_in_its_own_formats_and_so_are_the_others(
    tiny_model: Tiny, short_text: Path, tmp_path: Path, run
):
    out, recipe = tmp_path / "out", tmp_path / "recipe.yaml"
    recipe.write_text(
        "format: {sinks: 2, recent: 64, layers: {0: c2r4}}\ntransform: {method: rtn}\n"
    )
    argv = ["quantize", str(tiny_model("deepseek_v3")), "-o", str(out), "--quiet"]
    assert main([*argv, "--recipe", str(recipe), "--text", str(short_text)]) == 0
    asked = {"methods": ("quarot",), "unprotected": True}
    rows = run(out, **asked)
    four, two = (run(out, format=name, **asked) for name in ("c4r4", "c2r4"))
    for at in (1, 2):
        assert rows[at]["format"] == "mixed"
        assert (rows[at]["sinks"], rows[at]["recent"]) == (0, None)
        assert four[at]["kl_mean"] < rows[at]["kl_mean"] < two[at]["kl_mean"]
        sizes = [r[at]["bytes_per_token"] for r in (four, rows, two)]
        assert sizes == sorted(sizes, reverse=True)
        assert len(set(sizes)) == 3
