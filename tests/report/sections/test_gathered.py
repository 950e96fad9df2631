"""What each section takes from the files, against sums done by hand."""

import pytest
from report_samples import (
    calibration,
    checkpoint,
    decode,
    eval_row,
    evaluated,
    files_of,
    log,
    run_record,
    serve,
    study_times,
    tasks,
)

from quantmla.report.collect import KINDS, Record, RunFiles
from quantmla.report.sections import section


def gathered(key, files):
    """What a section gathers from files by name."""

    def kind(data):
        return next(kind for kind, fits in KINDS.items() if fits(data))

    records = tuple(Record(name, kind(data), data) for name, data in sorted(files.items()))
    return section(key).gather(RunFiles("run", records))


def test_capacity_of_a_checkpoint():
    (row,) = gathered("capacity", {"config.json": checkpoint()})["rows"]
    assert row["bytes"] == 110.0
    assert row["bf16_bytes"] == 384.0
    assert row["factor"] == 384 / 110
    assert row["tokens_per_gb"] == 10**9 // (8 * 110)
    planes = {"content": 64.0, "rope": 32.0, "scales": 8.0, "zero_points": 4.0, "mean": 2.0}
    assert row["planes"] == planes | {"padding": 0.0}


def test_capacity_of_layers_with_formats_of_their_own():
    config = checkpoint()
    own = config["quantmla_config"]
    own["format"] = own["format"] | {"layers": {"0": {"content_bits": 2}}}
    del own["layout"]
    (row,) = gathered("capacity", {"config.json": config})["rows"]
    assert row["format"] == "c4r4, mixed"
    assert row["planes"] is None
    assert row["bytes"] == (7 * 110 + 78) / 8


def test_capacity_without_a_checkpoint_is_by_layer():
    (row,) = gathered("capacity", {"eval.json": evaluated()})["rows"]
    assert row["bytes"] == 110.0
    assert "tokens_per_gb" not in row


def test_of_two_evaluations_the_longer_counts():
    short = evaluated(5.0)
    for row in short["rows"]:
        row["tokens"] = 100
    found = gathered("quality", {"a.json": evaluated(), "b.json": short})
    group = found["groups"][0]
    assert [row["method"] for row in group["rows"]] == ["bf16", "rtn", "quantmla"]
    assert group["rows"][2]["kl_mean"] == 0.0031
    assert group["measured"]["n"] == 12282
    assert group["measured"]["file"] == "a.json"


def test_quality_without_the_first_row():
    alone = {"header": {}, "rows": [eval_row("rtn", "c2r4", 0.1)]}
    (group,) = gathered("quality", {"a.json": alone})["groups"]
    assert [row["method"] for row in group["rows"]] == ["rtn"]


def test_context_leaves_out_what_has_no_divergence():
    (bare, kept) = gathered("context", {"eval.json": evaluated()})["groups"]
    assert bare["recent"] is None
    assert kept["recent"] == 128
    assert [b["end"] for b in bare["methods"]["rtn"]] == [64, 128, 256]


def test_learning_curves_are_shares_of_each_phase():
    (part,) = gathered("learning", {"quantmla_log.json": log()})["parts"]
    first = [c for c in part["curves"] if c["layer"] == "0"]
    assert [(c["path"], c["phase"]) for c in first] == [("content", 0), ("content", 1), ("rope", 0)]
    assert first[0]["points"] == [[0, 1.0], [10, 0.5]]
    assert first[1]["points"] == [[10, 1.0], [15, 0.95]]


def test_channels_are_relative_to_their_layer_and_sorted():
    content, rope = gathered("channels", {"quantmla_log.json": log()})["parts"]
    rms = (21 / 3) ** 0.5
    assert content["panels"][0]["before"] == [4 / rms, 2 / rms, 1 / rms]
    assert rope["panels"][0]["before"] == [3 / 5**0.5, 1 / 5**0.5]
    assert content["flatness"][0]["before"] == 4 / rms


def test_logs_of_before_channels_were_kept():
    older = [{k: v for k, v in layer.items() if k != "spread"} for layer in log()]
    assert gathered("channels", {"quantmla_log.json": older}) is None
    assert gathered("layers", {"quantmla_log.json": older}) is not None


def test_the_peak_memory_and_its_machine_are_in_the_report():
    files = {"out/quantmla_log.json": log(), "out/quantmla_run.json": run_record()}
    (part,) = gathered("cost", files)["parts"]
    assert part["seconds"] == 33.0
    assert part["peak_gib"] == 1.0
    assert part["measured"]["machine"] == "CPU x86_64"
    assert part["measured"]["file"] == "out/quantmla_log.json"


def test_times_of_learning_and_of_studies_are_told_apart():
    times = {"a_calibration.json": calibration(), "b_studies.json": study_times()}
    both = gathered("cost", times)
    assert [row["method"] for row in both["shapes"]["rows"]] == ["quantmla"]
    assert [row["study"] for row in both["studies"]["rows"]] == ["gain", "move"]
    shown = str(section("cost").render(both))
    assert "12.5" in shown
    assert "0.92" in shown
    alone = gathered("cost", {"b_studies.json": study_times()})
    assert (alone["shapes"], alone["studies"]) == (None, both["studies"])


def test_needles_and_tasks_share_a_file():
    (part,) = gathered("tasks", {"tasks.json": tasks()})["parts"]
    assert {row["task"] for row in part["results"]} == {"piqa"}
    (part,) = gathered("needles", {"tasks.json": tasks()})["parts"]
    assert [(r["kind"], r["length"], r["score"]) for r in part["results"]] == [
        ("single_1", 1024, 1.0),
        ("single_1", 1024, 0.75),
    ]


def test_tasks_say_whether_answers_came_from_native_kernels():
    def kinds(found):
        return [
            gathered(key, {"tasks.json": found})["parts"][0]["measured"]["kind"]
            for key in ("tasks", "needles")
        ]

    scored, written = kinds(tasks())
    assert scored.startswith("scored texts: simulated")
    assert "answers" not in scored
    assert written == "answers: decoded through the quantised cache in torch, no native kernel"
    served = tasks()
    served["settings"]["engine"] = "vllm"
    assert set(kinds(served)) == {"answers: decoded by vLLM with native kernels over packed pages"}


def test_serving_is_the_median_against_bf16():
    bare, packed = gathered("serving", {"serve.json": serve()})["rows"]
    assert bare["output_tok_s"] == 105.0
    assert packed["ratio"] == pytest.approx(250 / 105)
    assert packed["tpot_p50"] == pytest.approx(12.0)


def test_serving_of_smaller_models_is_no_repeat():
    found = serve()
    found["rows"] = [row | {"layers": 27} for row in found["rows"]]
    smaller = [row | {"layers": 5, "output_tok_s": 9.0} for row in found["rows"]]
    rows = gathered("serving", {"serve.json": found | {"rows": found["rows"] + smaller}})["rows"]
    named = {(row["job"].split("; ")[1], row["variant"]): row["ratio"] for row in rows}
    assert named["27 layers", "c4r4"] == pytest.approx(250 / 105)
    assert named["5 layers", "c4r4"] == 1.0


def test_serving_takes_all_files_of_a_day():
    def faster(by, **more):
        found = serve()
        return found | {
            "rows": [
                row | more | {"output_tok_s": row["output_tok_s"] * by} for row in found["rows"]
            ]
        }

    older, other = faster(9.0), faster(2.0, job="another")
    files = {"serve_20260102.json": older, "serve_20260203.json": serve()}
    files |= {"serve_20260203_2.json": faster(3.0), "serve_20260203_more.json": other}
    elsewhere = faster(9.0) | {"environment": other["environment"] | {"gpu": "another"}}
    elsewhere["rows"] = elsewhere["rows"][:2]
    found = gathered("serving", files | {"serve_20260203_y.json": elsewhere})
    speeds = {(row["job"], row["variant"]): row["output_tok_s"] for row in found["rows"]}
    first = serve()["rows"][0]["job"]
    assert speeds[first, "bf16"] == (110 + 300) / 2
    assert speeds[first, "c4r4"] == (250 + 750) / 2
    assert speeds["another", "bf16"] == 210
    assert {row["pool_tokens"] for row in found["rows"]} == {100_000}
    assert all(isinstance(row["pool_tokens"], int) for row in found["rows"])
    assert [source["file"] for source in found["measured"]] == list(files)[1:]
    assert {source["repeats"] for source in found["measured"]} == {"1 to 2"}


def test_serving_figures_that_are_no_numbers_stay_so():
    found = serve()
    found["rows"] = [row | {"pool_tokens": float("inf")} for row in found["rows"]]
    rows = gathered("serving", {"serve.json": found})["rows"]
    assert {row["pool_tokens"] for row in rows} == {float("inf")}


def test_kernels_keep_what_was_measured():
    found = gathered("kernels", {"decode.json": decode()})
    ratios = [row["ratio"] for row in found["decode"]["rows"]]
    assert ratios == [294.96 / 467.94, 294.96 / 163.87]  # of the times, which say more
    assert found["decode"]["measured"]["machine"] == "NVIDIA H200, driver 580"


def test_predicted_ratios_are_trace_times_allocation_times_gamma():
    found = gathered("predictor", {"analysis.json": files_of()["analysis.json"]})
    first = found["points"][0]
    expected = 2.718281828459045**-0.2 * (0.4 / 0.1) * (1.0 / 1.2)
    assert first["predicted"] == pytest.approx(expected)
    assert first["measured"] == pytest.approx(0.5 / 0.2)


def test_a_plan_of_a_benchmark_comes_before_the_study_s():
    files = {name: files_of()[name] for name in ("analysis.json", "bit_plan.json")}
    assert gathered("bit_plan", files)["rows"]
    del files["bit_plan.json"]
    found = gathered("bit_plan", files)
    assert found["rows"] == []
    assert found["plan"]["budget"] == 94.0
