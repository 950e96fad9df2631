"""The figures of docs/serving.md are those of the newest result file."""

import json

import make_serving
import pytest

ROW = {
    "job": "64 x (4K + 2K)",
    "variant": "bf16",
    "repeat": 0,
    "layers": 5,
    "prefix_caching": False,
    "pool_tokens": 1000,
    "pool_bytes": 2**30,
    "output_tok_s": 100.0,
    "preemptions": 3,
    "recomputed_tokens": 12_345,
    "max_running": 7,
    "ttft_p50": 0.5,
    "tpot_p50": 0.004,
    "tpot_p99": 0.0101,
    "gap_p50": 0.0031,
}
ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": "580",
    "time": "2026-02-03T04:05:06+00:00",
    "quantmla": "0.1.0",
    "packages": {"vllm": "0.26.0", "torch": "2.11.0"},
}


def test_the_page_is_up_to_date():
    text, drawing = make_serving.render()
    assert make_serving.PAGE.read_text(encoding="utf-8") == text
    if drawing is not None:
        assert make_serving.PLOT.read_text(encoding="utf-8") == drawing


@pytest.fixture
def places(tmp_path):
    page = tmp_path / "serving.md"
    page.write_text(
        "top\n<!-- serving: generated -->\nold\n<!-- end of serving -->\nend\n"
        "<!-- scheduler: generated -->\nold\n<!-- end of scheduler -->\n"
        "<!-- answers: generated -->\nold\n<!-- end of answers -->\n"
        "<!-- gains: generated -->\n<!-- end of gains -->\n"
        "<!-- families: generated -->\n<!-- end of families -->\n"
    )
    return tmp_path, page


def test_medians_and_ratios(places):
    folder, page = places
    packed = ROW | {"variant": "c4r4", "preemptions": 0, "recomputed_tokens": 0}
    rows = [ROW, *(packed | {"output_tok_s": rate} for rate in (200.0, 900.0, 310.0))]
    old = {"environment": ENVIRONMENT, "rows": []}
    (folder / "serve_h100_20260102.json").write_text(json.dumps(old))
    new = {"environment": ENVIRONMENT, "rows": rows}
    (folder / "serve_h200_20260203.json").write_text(json.dumps(new))
    text, drawing = make_serving.render(folder, page)
    assert "old" not in text
    assert "NVIDIA H200, driver 580, QuantMLA 0.1.0, vllm 0.26.0, torch 2.11.0\n" in text
    assert "**64 x (4K + 2K)**: 5 layers, cache of 1.00 GiB, prefix caching off" in text
    assert (
        "| bf16 | 1,000 | 100 |  | 1.00 | 3 | 12,345 | 7 | 0.50 | 4.00 | 10.10 | 3.10 | 1 |" in text
    )
    packed = (
        "| c4r4 | 1,000 | 310 | 200 to 900 | 3.10 | 0 | 0 | 7 | 0.50 | 4.00 | 10.10 | 3.10 | 3 |"
    )
    assert packed in text
    assert ">3.10</text>" in drawing
    assert ">64 x (4K + 2K)</tspan>; 5 layers</text>" in drawing


def test_models_of_other_sizes_are_not_compared():
    other = ROW | {"variant": "c4r4", "layers": 13}
    found = make_serving.jobs([ROW, other])
    assert {asked: list(variants) for asked, variants in found.items()} == {
        ("64 x (4K + 2K)", 5): ["bf16"],
        ("64 x (4K + 2K)", 13): ["c4r4"],
    }
    assert make_serving.gain(found["64 x (4K + 2K)", 13], "c4r4") is None


def test_what_is_gained_is_said_of_medians_and_of_single_runs():
    def row(job, variant, speed):
        return ROW | {"job": job, "variant": variant, "output_tok_s": speed}

    rows = [row("a", "bf16", 100.0), row("a", "bf16", 110.0), row("a", "bf16", 80.0)]
    rows += [row("a", "c4r4", 121.0), row("a", "c4r4", 160.0), row("a", "c2r4", 150.0)]
    rows += [row("b", "bf16", 10.0), row("b", "c4r4", 30.0), row("b", "c2r4", 20.0)]
    rows += [row("not in all caches", variant, 1.0) for variant in ("bf16", "c4r4")]
    assert make_serving.gains_table(rows).splitlines()[2:] == [
        "| b | 5 | 3.00 | 3.00 | 2.00 | 2.00 |",
        "| a | 5 | 1.41 | 1.10 to 2.00 | 1.50 | 1.36 to 1.88 |",
    ]


def test_all_runs_of_a_day_are_in_the_medians(places):
    folder, page = places
    runs = {"serve_h200_20260203.json": 100.0, "serve_h200_20260203_more_2.json": 130.0}
    others = {"serve_h200_20260101_3.json": 999.0, "serve_h100_20260203.json": 999.0}
    for name, speed in (runs | others).items():
        other = ENVIRONMENT | {"packages": {"vllm": "0.26.0", "numpy": f"1.{speed:.0f}"}}
        rows = [ROW | {"output_tok_s": speed}]
        (folder / name).write_text(json.dumps({"environment": other, "rows": rows}))
    text, _ = make_serving.render(folder, page)
    assert "| bf16 | 1,000 | 115 | 100 to 130 | 1.00 |" in text
    for name, speed in runs.items():
        source = f"- `benchmarks/results/{name}`: of 2026-02-03T04:05, NVIDIA H200, driver 580"
        assert f"{source}, QuantMLA 0.1.0, vllm 0.26.0, numpy 1.{speed:.0f}\n" in text
    assert "999" not in text


def test_runs_that_did_other_things_are_not_pooled():
    with pytest.raises(ValueError, match=r"64 x \(4K \+ 2K\).*bf16, differ in one of .*steps"):
        make_serving.jobs([ROW | {"steps": 40}, ROW | {"steps": 41}])


def test_a_job_that_bf16_has_not_run_has_no_ratio(places):
    folder, page = places
    rows = [ROW | {"variant": "c2r4"}]
    (folder / "serve_h200_20260203.json").write_text(
        json.dumps({"environment": ENVIRONMENT, "rows": rows})
    )
    text, drawing = make_serving.render(folder, page)
    assert "| c2r4 | 1,000 | 100 |  | - |" in text
    assert ">no run of bf16</text>" in drawing


def test_without_a_file_no_figure_is_claimed(places):
    folder, page = places
    wanted = page.read_text().replace("old", make_serving.NOT_RUN)
    wanted = wanted.replace(
        "<!-- end of families", f"{make_serving.NO_FAMILIES}\n<!-- end of families"
    )
    wanted = wanted.replace("<!-- end of gains", f"{make_serving.NOT_RUN}\n<!-- end of gains")
    assert make_serving.render(folder, page) == (wanted, None)


def test_what_the_scheduler_did(places):
    folder, page = places
    plain = {"job": "j", "variant": "bf16", "max_running": 4, "preemptions": 1, "blocks": 100}
    plain |= {"recomputed_tokens": 131_520, "reused_tokens": 0, "pool_bytes": 1000}
    plain |= {"peak_tokens": 50, "peak_blocks": 50}  # 50 tokens in 500 bytes
    packed = plain | {"variant": "c4r4", "preemptions": 0, "recomputed_tokens": 0}
    packed |= {"max_running": 5, "pool_bytes": 800, "peak_tokens": 140, "peak_blocks": 50}
    data = {"environment": ENVIRONMENT, "rows": [plain, packed]}
    (folder / "scheduler_20260203.json").write_text(json.dumps(data))
    text, _ = make_serving.render(folder, page)
    assert "vllm 0.26.0, on a CPU; from `benchmarks/results/scheduler_20260203.json`." in text
    assert "| j | bf16 | 4 | 1 | 131,520 | 0 | 1.00 |" in text
    assert "| j | c4r4 | 5 | 0 | 0 | 0 | 3.50 |" in text


def test_how_far_answers_are_from_those_of_transformers(places):
    folder, page = places
    row = {"run": "c4r4, V1 runner", "case": "chat", "requests": 6, "tokens": 240, "rms": 0.0171}
    row |= {"other_tokens": 6, "largest_lead": 0.0338, "rms_allowed": 0.0383, "worst": 0.1139}
    row |= {"worst_allowed": 0.336}
    other = row | {"run": "c4r4, V2 runner"}
    data = {"environment": ENVIRONMENT, "rows": [row, other, other | {"case": "pages"}]}
    (folder / "answers_h200_20260203.json").write_text(json.dumps(data))
    text, _ = make_serving.render(folder, page)
    figures = "6 | 240 | 6 | 0.034 | 0.017 | 0.038 | 0.114 | 0.336 |"
    assert f"| c4r4, V1 runner and V2 runner | chat | {figures}" in text
    assert f"| c4r4, V2 runner | pages | {figures}" in text
    assert "Served on NVIDIA H200 by vllm 0.26.0" in text


def test_families_that_started(places):
    folder, page = places
    row = {"family": "longcat_flash", "format": "c4r4", "packed_layers": 4, "compiled": False}
    row |= {"finite": True, "bytes_per_token": [320], "decoded": [32, 32, 32]}
    data = {"environment": ENVIRONMENT, "rows": [row]}
    (folder / "families_h200_20260203.json").write_text(json.dumps(data))
    text, _ = make_serving.render(folder, page)
    assert "| longcat_flash | 4 | 320 | no |" in text
    assert "on NVIDIA H200 in c4r4" in text
