"""`quantmla bench` without a GPU: what it refuses, prints, stores, and leaves out."""

import json
from pathlib import Path

import pytest
import torch
from cases import Case, all_tokens, build

from quantmla.bench import append, command, decode
from quantmla.bench.baselines import TORCH
from quantmla.bench.command import Request, bench_and_store
from quantmla.bench.decode import CASES, DEQUANTIZED, Shape, needed_bytes, shapes_of
from quantmla.errors import UsageError
from quantmla.kernels.problem import Tokens


def request(folder: Path, **changes) -> Request:
    return Request(**({"what": "decode", "output": folder} | changes))


def test_without_a_gpu_one_sentence_says_so(tmp_path):
    for what in ("decode", "append"):
        with pytest.raises(UsageError, match=f"bench {what} needs a GPU, and torch sees none"):
            bench_and_store(request(tmp_path, what=what))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backends": ["gluon"]}, r"backend 'gluon' is not one of \('cuda', 'triton'"),
        ({"formats": ["c5r4"]}, "unknown cache format 'c5r4'"),
        ({"libraries": Path("nowhere")}, "no folder at nowhere"),
        ({"output": Path("/dev/null/x")}, "output /dev/null/x cannot be written"),
    ],
)
def test_unknown_names_are_refused_first(tmp_path, changes, message):
    with pytest.raises(UsageError, match=message):
        bench_and_store(request(tmp_path, **changes))


@pytest.fixture
def gpu(monkeypatch):
    """As if there were one; nothing is run on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Toy 9")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


ROW_KEYS = (
    *("backend", "format", "heads", "query_len", "context", "batch"),
    *("us", "baseline", "baseline_us", "ratio"),
)


def timed(shape: Shape, us: float) -> list[dict]:
    times = {"cuda": us, "triton": 4 * us, "flashmla": 3 * us, "fa3_mla": 2 * us}
    times[DEQUANTIZED + "fa3_mla"] = 9 * us
    return decode._rows(shape, ["cuda", "triton"], ["flashmla", "fa3_mla"], times)


def test_a_row_names_the_faster_baseline():
    fast, slow = timed(CASES["musts"][0], 100.0)
    assert [row["ratio"] for row in (fast, slow)] == [2.0, 0.5]
    assert fast["baseline"] == slow["baseline"] == "fa3_mla"
    assert fast["others_us"]["flashmla"] == 300
    assert fast["dequantize_then_attend_us"] == 900
    assert set(ROW_KEYS) <= set(fast)


def test_rows_are_printed_and_stored_as_they_come(gpu, tmp_path, monkeypatch, capsys):
    seen = []

    def cases(request):
        for i, shape in enumerate(CASES["musts"][:3]):
            files = list(tmp_path.iterdir())
            seen.append(len(json.loads(files[0].read_text())["rows"]) if files else 0)
            yield str(shape), lambda shape=shape, i=i: timed(shape, 100.0 + i)

    monkeypatch.setattr(command, "_cases", cases)
    path = bench_and_store(request(tmp_path))
    assert seen == [0, 2, 4]
    assert path.name.startswith("decode_toy-9_20")
    data = json.loads(path.read_text())
    assert data["environment"]["gpu"] == "NVIDIA Toy 9"
    assert {"driver", "cuda", "packages"} <= set(data["environment"])
    assert [row["us"] for row in data["rows"]] == [100.0, 400.0, 101.0, 404.0, 102.0, 408.0]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert lines[0].split()[:6] == ["backend", "format", "heads", "query", "context", "batch"]
    assert lines[1].split() == [
        *("cuda", "c4r4", "16", "1", "32768", "32"),
        *("100.0", "fa3_mla", "200.0", "2.0", "900.0"),
    ]
    assert list(tmp_path.iterdir()) == [path]  # no draft is left


def test_rows_that_cannot_be_stored_are_printed(gpu, tmp_path, monkeypatch, capsys):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command, "_cases", lambda _: [("x", lambda: timed(CASES["musts"][0], 1.5))])
    monkeypatch.setattr(command, "write", full)
    with pytest.raises(OSError, match="No space"):
        bench_and_store(request(tmp_path))
    shown = capsys.readouterr()
    assert "1.5" in shown.out
    assert shown.err == ""  # no row is said to be in the file


def test_a_later_run_replaces_its_own_rows_alone(gpu, tmp_path, monkeypatch, capsys):
    first, second = CASES["musts"][:2]
    monkeypatch.setattr(
        command,
        "_cases",
        lambda _: iter([(str(s), lambda s=s: timed(s, 1.0)) for s in (first, second)]),
    )
    bench_and_store(request(tmp_path))
    monkeypatch.setattr(command, "_cases", lambda _: iter([("again", lambda: timed(second, 2.0))]))
    path = bench_and_store(request(tmp_path))
    rows = json.loads(path.read_text())["rows"]
    assert [(row["context"], row["us"]) for row in rows] == [
        (first.context, 1.0), (first.context, 4.0), (second.context, 2.0), (second.context, 8.0),
    ]  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA toy-9")  # another GPU
    with pytest.raises(UsageError, match=r"measured with other versions \(gpu\): move it away"):
        bench_and_store(request(tmp_path))
    path.write_text("{}")
    with pytest.raises(UsageError, match="is not a result file"):
        bench_and_store(request(tmp_path))


def test_when_the_seconds_are_over_the_rest_is_named(gpu, tmp_path, monkeypatch, capsys):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(command.time, "monotonic", lambda: next(clock))
    shapes = CASES["musts"][:4]
    monkeypatch.setattr(
        command,
        "_cases",
        lambda _: ((f"case {i}", lambda s=s: timed(s, 1.0)) for i, s in enumerate(shapes)),
    )
    path = bench_and_store(request(tmp_path, seconds=25.0))
    assert len(json.loads(path.read_text())["rows"]) == 4
    assert "not measured, 25 seconds are over: case 2, case 3" in capsys.readouterr().err


def test_a_fault_in_a_later_case_keeps_the_rows_before(gpu, tmp_path, monkeypatch, capsys):
    def broken():
        raise RuntimeError("out of memory")

    monkeypatch.setattr(
        command,
        "_cases",
        lambda _: iter([("a", lambda: timed(CASES["musts"][0], 1.0)), ("b", broken)]),
    )
    with pytest.raises(RuntimeError):
        bench_and_store(request(tmp_path))
    assert "2 rows are in" in capsys.readouterr().err


def test_shapes_of_the_goals_and_of_the_paper():
    musts = shapes_of("musts", None)
    assert Shape(16, 1, 32768, 32, "c2r4") in musts
    assert {shape.heads for shape in musts} == {16, 32, 64, 128}
    assert {shape.context for shape in CASES["paper"]} == {1024 * 4**i for i in range(6)}
    assert {shape.batch for shape in CASES["paper"]} == {8, 32}
    assert {shape.query_len for shape in shapes_of("all", None)} == {1, 2, 4}
    assert {shape.format for shape in shapes_of("musts", ["C2R4"])} == {"c2r4"}
    assert len(shapes_of("musts", ["c2r4"])) == 8  # one size is there in both formats


def test_shapes_that_do_not_fit_are_left_out(monkeypatch, capsys):
    huge = Shape(16, 1, 1 << 20, 32)
    # packed 320, bf16 1152 and 8 bytes of indices a token
    assert 49e9 < needed_bytes(huge, ["fa3_mla"]) < 53e9
    assert needed_bytes(huge, []) < 14e9
    # 96 bytes for 16 heads' scores
    assert needed_bytes(huge, [TORCH]) - needed_bytes(huge, ["fa3_mla"]) == (96 << 20) * 32
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 << 30, 24 << 30))
    names = [name for name, _ in decode.cases([huge, CASES["musts"][0]], None, ["fa3_mla"])]
    assert names == ["16 heads x 1, 32768 x 32, c4r4"]
    assert "left out: 16 heads x 1, 1048576 x 32 needs" in capsys.readouterr().err


def test_rows_of_append_say_what_a_copy_would_take():
    row = append._row("cuda", "c4r4", "prompt_8192", 8_000_000, {"cuda": 4.0, "copy": 3.0})
    assert row["gb_per_s"] == 2000
    assert row["share_of_copy"] == 0.75
    assert "copy_us" not in append._row("cuda", "c4r4", "tokens_256", 1, {"cuda": 4.0})
    assert {key for _, key, _ in append.COLUMNS} >= {"job", "us", "share_of_decode"}


def test_appended_bytes_are_counted_once(monkeypatch):
    """A prompt's rows are read and written once, and its pages written."""
    view = build(Case(name="count", lengths=(130,)))[1]
    tokens = all_tokens((128,))
    job = append.Job("prompt_128", tokens, view, pages=2)
    assert append._bytes(job) == 128 * 1152 * 2 + 2 * 20480
    # a token each that ends a page: the page's other 63 rows are read back
    ends = append.Job("ends", Tokens(*(x[:3] for x in tokens)), view, 3, read_back=189, layers=2)
    assert append._bytes(ends) == 2 * (3 * 64 * 1152 + 3 * 1152 + 3 * 20480)
