"""Learning of whole checkpoints: what is kept, what a resumed run makes, what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import random_tokens, rewrite_tensors

from quantmla.arch import adapter_for
from quantmla.capture.tokens import CalibrationTokens
from quantmla.checkpoint.source import open_source
from quantmla.errors import QuantMLAError, UsageError
from quantmla.layer_log import Learned
from quantmla.learn import LearnSettings, learn_checkpoint
from quantmla.method import load_method, paper, rtn
from quantmla.quant.format import parse_format
from quantmla.transform.store import transforms_to_bytes
from quantmla.workdir import empty_workdir

Tiny = Callable[[str], Path]
TOKENS = CalibrationTokens(random_tokens(1, 70), random_tokens(2, 70))
SETTINGS = LearnSettings(
    method="paper",
    options=paper.Options(steps=4, batch_size=2),
    fmt=parse_format("c4r4", group_size=16),
)
PLAIN = replace(SETTINGS, method="rtn", options=rtn.Options())


class Kill(Exception):
    pass


def learn(
    folder: Path,
    workdir: Path,
    settings: LearnSettings = SETTINGS,
    tokens: CalibrationTokens = TOKENS,
    **options,
) -> Learned:
    source = open_source(folder)
    return learn_checkpoint(
        source, adapter_for(source.config), tokens, settings, workdir, **options
    )


def kill_after(layers: int):
    seen = []

    def on_layer(log) -> None:
        seen.append(log.prefix)
        if len(seen) == layers:
            raise Kill

    return on_layer


@pytest.mark.parametrize("case", ["deepseek_v3", "longcat_flash", "kimi_linear"])
def test_every_latent_attention_gets_a_transform_and_a_log(
    case: str, tiny_checkpoint: Tiny, tmp_path: Path
):
    folder = tiny_checkpoint(case)
    source = open_source(folder)
    sites = adapter_for(source.config).sites(source.config, source.names)
    heard = []
    learned = learn(folder, tmp_path / "work", on_layer=heard.append)
    assert list(learned.transforms) == [site.prefix for site in sites]
    assert tuple(heard) == learned.logs
    for log, prefix in zip(learned.logs, learned.transforms, strict=True):
        assert log.prefix == prefix
        assert log.seconds > 0
        assert log.peak_bytes > 2**20
        assert 0 < log.after.content_output < 1.1 * log.before.content_output
        assert {(path, step) for path, step, _ in log.history} == {
            (path, step) for path in ("content", "rope") for step in (0, 4)
        }


@pytest.mark.parametrize("case", ["deepseek_v3", "longcat_flash"])
def test_a_killed_run_goes_on_to_the_same_bytes(case: str, tiny_checkpoint: Tiny, tmp_path: Path):
    folder = tiny_checkpoint(case)
    whole = learn(folder, tmp_path / "whole")
    killed = tmp_path / "killed"
    with pytest.raises(Kill):
        learn(folder, killed, on_layer=kill_after(1))
    assert len(list(killed.glob("layer_*.json"))) == 1
    heard = []
    resumed = learn(folder, killed, resume=True, on_layer=heard.append)
    assert len(heard) == len(whole.logs) - 1  # the finished layer is not learned again
    assert transforms_to_bytes(resumed.transforms) == transforms_to_bytes(whole.transforms)
    assert list(resumed.transforms) == list(whole.transforms)
    for a, b in zip(resumed.logs, whole.logs, strict=True):  # read back from JSON or not
        assert (a.prefix, a.before, a.after, a.history) == (b.prefix, b.before, b.after, b.history)
        assert type(a.before) is type(b.before)


def test_other_threads_are_told_and_not_refused(tiny_checkpoint: Tiny, tmp_path: Path, capsys):
    folder, work = tiny_checkpoint("deepseek_v3"), tmp_path / "work"
    capsys.readouterr()
    with pytest.raises(Kill):
        learn(folder, work, PLAIN, on_layer=kill_after(1))
    with pytest.raises(Kill):
        learn(folder, work, PLAIN, resume=True, on_layer=kill_after(1))
    assert capsys.readouterr().err == ""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        learn(folder, work, PLAIN, resume=True)
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr().err
    assert f"with {threads} CPU threads and goes on with {threads + 1}: layers may differ" in said
    assert said.count("\n") == 1


def test_a_run_killed_after_its_last_layer_learns_nothing_again(
    tiny_checkpoint: Tiny, tmp_path: Path
):
    folder, work = tiny_checkpoint("deepseek_v3"), tmp_path / "work"
    with pytest.raises(Kill):
        learn(folder, work, on_layer=kill_after(2))
    resumed = learn(folder, work, resume=True, on_layer=kill_after(1))
    assert len(resumed.transforms) == 2


def test_the_seed_and_the_layer_decide_and_nothing_else(tiny_checkpoint: Tiny, tmp_path: Path):
    folder = tiny_checkpoint("deepseek_v3")
    one = learn(folder, tmp_path / "a")
    other = learn(folder, tmp_path / "b", replace(SETTINGS, seed=1))
    assert transforms_to_bytes(one.transforms) != transforms_to_bytes(other.transforms)


def test_an_unfinished_run_is_not_overrun(tiny_checkpoint: Tiny, tmp_path: Path):
    folder, work = tiny_checkpoint("deepseek_v3"), tmp_path / "work"
    with pytest.raises(Kill):
        learn(folder, work, on_layer=kill_after(1))
    before = sorted(work.iterdir())
    with pytest.raises(UsageError, match="work holds an unfinished run: go on with --resume"):
        learn(folder, work)
    assert sorted(work.iterdir()) == before


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("seed", {"seed": 3}),
        ("format", {"fmt": parse_format("c2r4", group_size=16)}),
        ("options", {"options": paper.Options(steps=5, batch_size=2)}),
        ("method", {"method": "rtn", "options": rtn.Options()}),
        ("tokens", {}),
        ("model", {}),
    ],
)
def test_a_mismatch_names_the_field(
    field: str, change: dict, tiny_checkpoint: Tiny, tmp_path: Path
):
    work = tmp_path / "work"
    with pytest.raises(Kill):
        learn(tiny_checkpoint("deepseek_v3"), work, on_layer=kill_after(1))
    folder = tiny_checkpoint("youtu" if field == "model" else "deepseek_v3")
    tokens = TOKENS
    if field == "tokens":
        tokens = replace(TOKENS, held_out_BS=random_tokens(5, 70))
    with pytest.raises(UsageError, match="holds another run") as error:
        learn(folder, work, replace(SETTINGS, **change), tokens, resume=True)
    assert field in str(error.value)
    assert "remove it to begin anew" in str(error.value)


def test_resuming_where_nothing_was_begun_begins(tiny_checkpoint: Tiny, tmp_path: Path):
    settings = replace(SETTINGS, method="rtn", options=rtn.Options())
    for work in (tmp_path / "absent", tmp_path / "empty"):
        if work.name == "empty":  # killed between making the folder and writing to it
            work.mkdir()
            (work / "state.json.partial").write_text("{")
        learned = learn(tiny_checkpoint("deepseek_v3"), work, settings, resume=True)
        assert len(learned.transforms) == 2


def test_a_folder_of_somebody_else_is_neither_used_nor_removed(
    tiny_checkpoint: Tiny, tmp_path: Path
):
    work = tmp_path / "work"
    work.mkdir()
    (work / "thesis.txt").write_text("years")
    for resume in (False, True):
        with pytest.raises(UsageError, match="is in the way and no work folder"):
            learn(tiny_checkpoint("deepseek_v3"), work, resume=resume)
    empty_workdir(work)
    assert (work / "thesis.txt").read_text() == "years"


def test_our_own_work_folder_is_emptied(tiny_checkpoint: Tiny, tmp_path: Path):
    settings = replace(SETTINGS, method="rtn", options=rtn.Options())
    learn(tiny_checkpoint("deepseek_v3"), tmp_path / "work", settings)
    assert json.loads((tmp_path / "work" / "state.json").read_text())["method"] == "rtn"
    empty_workdir(tmp_path / "work")
    assert list((tmp_path / "work").iterdir()) == []
    empty_workdir(tmp_path / "work")


def test_sequences_that_do_not_fit_the_model_are_refused_before_a_folder_is_made(
    tiny_checkpoint: Tiny, tmp_path: Path
):
    tokens = CalibrationTokens(random_tokens(1, 3000), random_tokens(2, 3000))
    with pytest.raises(UsageError, match="3000 tokens are longer than the model's 2560"):
        learn(tiny_checkpoint("deepseek_v3"), tmp_path / "work", tokens=tokens)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_a_sentence(tiny_checkpoint: Tiny, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(QuantMLAError, match=r"cannot make .*file/work"):
        learn(tiny_checkpoint("deepseek_v3"), tmp_path / "file" / "work")


def test_running_out_of_memory_names_the_layer_and_the_settings(
    tiny_checkpoint: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fit(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(rtn, "fit", fit)
    with pytest.raises(QuantMLAError, match=r"learning model.layers.0.self_attn: lower num_seq"):
        learn(tiny_checkpoint("deepseek_v3"), tmp_path / "work", PLAIN)


def test_a_methods_error_names_the_layer(
    tiny_checkpoint: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fit(*args):
        raise QuantMLAError("learning diverged at step 3")

    monkeypatch.setattr(rtn, "fit", fit)
    with pytest.raises(QuantMLAError, match=r"model.layers.0.self_attn: learning diverged"):
        learn(tiny_checkpoint("deepseek_v3"), tmp_path / "work", PLAIN)


@pytest.mark.parametrize(("part", "factor"), [("kv_b_proj", 1e30), ("o_proj", 1e18)])
@pytest.mark.parametrize("method", ["rtn", "quantmla"])
def test_errors_that_are_not_finite_name_the_layer(
    method: str, part: str, factor: float, tiny_checkpoint: Tiny, tmp_path: Path
):
    folder = tiny_checkpoint("deepseek_v3")
    name = f"model.layers.0.self_attn.{part}.weight"
    large = {name: open_source(folder).tensor(name) * factor}
    broken = rewrite_tensors(folder, tmp_path / "large", large)
    settings = replace(SETTINGS, method=method, options=load_method(method).Options())
    with pytest.raises(QuantMLAError, match=r"layers.0.self_attn: errors .* not finite"):
        learn(broken, tmp_path / "work", settings)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("state.json", "{", "state.json is damaged"),
        ("state.json", "5", "state.json is damaged"),
        ("layer_0000.json", "{", "layer_0000.json is damaged"),
        ("layer_0000.json", "[]", "layer_0000.json is damaged"),
        ("layer_0000.json", '{"content": {"prefix": "x"}}', "layer_0000.json is damaged"),
        ("state.json", "[" * 100_000, "state.json is damaged"),
        ("layer_0000.safetensors", "garbage", "layer_0000.json is damaged"),
        ("layer_0000.safetensors", None, "layer_0000.json is damaged"),
    ],
)
def test_a_damaged_work_folder_is_one_sentence(
    name: str, content: str | None, words: str, tiny_checkpoint: Tiny, tmp_path: Path
):
    settings = replace(SETTINGS, method="rtn", options=rtn.Options())
    learn(tiny_checkpoint("deepseek_v3"), tmp_path, settings)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(QuantMLAError, match=words):
        learn(tiny_checkpoint("deepseek_v3"), tmp_path, settings, resume=True)


def test_edited_logs_and_swapped_layers_are_named(tiny_checkpoint: Tiny, tmp_path: Path):
    learn(tiny_checkpoint("deepseek_v3"), tmp_path, PLAIN)
    one, two = (tmp_path / f"layer_000{i}.json" for i in (0, 1))
    whole = one.read_text()
    log = json.loads(whole)["content"]
    for key, value in log.items():
        rest = {name: entry for name, entry in log.items() if name != key}
        # letters of a word would pass for three errors, or for a step of the history
        for edit in (rest, rest | {key: "abc"}, rest | {key: [value]}, rest | {"more": 1}):
            one.write_text(json.dumps(json.loads(whole) | {"content": edit}))
            with pytest.raises(QuantMLAError, match=r"layer_0000.json is damaged or .*: remove"):
                learn(tiny_checkpoint("deepseek_v3"), tmp_path, PLAIN, resume=True)
    one.write_text(two.read_text())
    with pytest.raises(QuantMLAError, match=r"layer_0000.json is damaged or .*: remove"):
        learn(tiny_checkpoint("deepseek_v3"), tmp_path, PLAIN, resume=True)
    one.unlink()
    assert len(learn(tiny_checkpoint("deepseek_v3"), tmp_path, PLAIN, resume=True).logs) == 2
