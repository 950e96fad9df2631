"""Small result files of every kind, with made-up numbers, for the tests of the report."""

import json
from importlib.resources import files
from pathlib import Path

from quantmla.quant.format import VERSION

HEADER = {
    "versions": {"quantmla": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "vllm": None},
    "gpus": [],
    "processor": "x86_64",
}
ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": "580",
    "quantmla": "0.1.0",
    "packages": {"torch": "2"},
}
SHA = "5" * 64
FORMAT = {
    **{"content_bits": 4, "rope_bits": 4, "group_size": 64, "rope_bands": 2},
    **{"rope_centring": "page", "range_rule": "hold_zero", "content_clip": 1.0, "rope_clip": 1.0},
    **{"page_size": 64, "num_sink_tokens": 4, "recent_window": 128, "version": VERSION},
}
PLANES = {
    **{"content": [0, 4096], "rope": [4096, 6144], "scales": [6144, 6656]},
    **{"zero_points": [6656, 6912], "mean": [6912, 7040], "page_bytes": 7040},
}


def checkpoint():
    config = json.loads((files("quantmla") / "assets/nano/config.json").read_text())
    own = {"version": 1, "format": FORMAT, "layout": PLANES, "method": "quantmla"}
    return config | {"quantmla_config": own | {"base_model": "nano", "base_sha256": SHA}}


def log(scale=1.0):
    return [
        {
            "prefix": f"model.layers.{i}.self_attn",
            "before": [4e-3 * scale, 3e-4, 2e-3],
            "after": [1e-3 * scale, 2e-4, 1.5e-3],
            "seconds": 10.0 * scale + i,
            "peak_bytes": 2**30,
            "history": [
                *(["content", 0, 4.0], ["content", 10, 2.0]),
                *(["content", 10, 2.0], ["content", 15, 1.9]),
                *(["rope", 0, 1.0], ["rope", 5, 0.9]),
            ],
            "spread": {
                "before": {"content": [1.0, 2.0, 4.0], "rope": [3.0, 1.0]},
                "after": {"content": [1.0, 1.1, 0.9], "rope": [1.0, 1.0]},
            },
        }
        for i in range(3)
    ]


def run_record():
    return {"schema": "quantmla-quantize", "version": 1, "header": HEADER}


def verified():
    keys = {"largest_fold_error": 3e-14, "largest_stored_error": 2e-3, "nll_before": 3.14}
    rest = {"logits_relative_error": 4e-3, "nll_drift": -2e-5, "tokens": 1022}
    return keys | rest | {"layers": [{"prefix": "model.layers.0.self_attn"}]}


def bucket(first, end, kl):
    rest = {"perplexity": 23.5, "kl_p99": 5 * kl, "kl_max": 9 * kl, "top1": 0.95}
    return {"first": first, "end": end, "tokens": 100, "kl_mean": kl} | rest


def eval_row(method, fmt, kl, **changes):
    row = {
        **{"method": method, "format": fmt, "sinks": 0, "recent": None},
        **{"perplexity": 23.2 + kl, "kl_mean": kl, "kl_p99": 8 * kl, "kl_max": 20 * kl},
        **{"top1": 1 - kl, "recall": 0.875, "tokens": 12282, "bytes_per_token": 110.0},
        "by_context": [bucket(0, 64, kl / 2), bucket(64, 128, kl), bucket(128, 256, 2 * kl)],
    }
    return row | changes


def evaluated(scale=1.0):
    rows = [
        eval_row("bf16", "bf16", 0.0, bytes_per_token=384.0, by_context=[bucket(0, 64, 0.0)]),
        eval_row("rtn", "c4r4", 0.0269 * scale, bytes_per_token=106.0),
        eval_row("quantmla", "c4r4", 0.0031 * scale),
        eval_row("rtn", "c4r4", 0.0007, sinks=4, recent=128, bytes_per_token=106.0),
        eval_row("quantmla", "c4r4", 0.0004 * scale, sinks=4, recent=128),
    ]
    return {"header": HEADER | {"model": "nano", "sha256": SHA}, "rows": rows}


def grid():
    rows = [
        eval_row("quantmla", f"c{c}r{r}", 0.1 / (c * r), bytes_per_token=10.0 * c + 5.0 * r)
        for c in (2, 4)
        for r in (2, 4)
    ]
    return {"header": HEADER | {"model": "nano", "grid": True, "note": "few steps"}, "rows": rows}


def tasks():
    names = ("piqa", "niah_single_1@1024")
    scores = {"piqa": (0.5625, 0.5), names[1]: (1.0, 0.75)}
    variants = [
        {"name": "bf16", "format": "bf16", "sinks": 0, "recent": None, "bytes_per_token": 384.0},
        {"name": "rtn", "format": "c4r4", "sinks": 4, "recent": 128, "bytes_per_token": 106.0},
    ]
    return {
        **{"schema": "quantmla-tasks", "version": 1, "complete": False, "header": HEADER},
        "model": {"id": "nano", "base": "nano", "base_sha256": SHA},
        "settings": {"limit": 16, "seed": 0, "device": "cpu", "engine": "transformers"},
        "variants": variants,
        "tasks": [
            {"name": n, "kind": kind, "shots": 0, "metric": "acc", "definition": "x"}
            | {"items_in_all": 1838}
            for n, kind in zip(names, ("likelihood", "generation"), strict=True)
        ],
        "results": [
            {
                **{"task": name, "variant": v["name"], "metric": "acc", "score": score},
                **{"stderr": 0.124, "recovery": score / pair[0], "items": 16, "seconds": 3.2},
            }
            for name, pair in scores.items()
            for v, score in zip(variants, pair, strict=True)
        ],
        "averages": [
            {"group": "niah", "variant": "rtn", "tasks": ["a", "b"], "score": 0.5, "recovery": None}
        ],
        "comparisons": [
            {
                **{"task": "piqa", "a": "bf16", "b": "rtn", "difference": -0.0625},
                **{"interval": [-0.1875, 0.0625], "test": "mcnemar", "p": 0.75},
                **{"only_a": 2, "only_b": 1, "items": 16},
            }
        ],
    }


def _matched(content, rope):
    ratio = rope / content
    return {
        "content": content,
        "rope": rope,
        "ratio": ratio,
        "interval": [0.9 * ratio, 1.1 * ratio],
    }


def _gain_point(i):
    one = {"finite_gain": 0.2 + i, "trace": 0.1 + i, "allocation": 1.2}
    return {"content": one, "rope": {"finite_gain": 0.5, "trace": 0.4, "allocation": 1.0}}


def _errors(plain):
    return {"plain": plain, "centred": plain / 4, "banded": plain / 5}


def _layer(i):
    pairs = {"energy": [1.0, 2.0], "page_mean": [0.5, 1.8]}
    pairs |= {"error_plain": [0.1, 0.2], "error_centred": [0.05, 0.1], "error_banded": [0.04, 0.08]}
    centring = {"page_mean_share": 0.6, "pairs": pairs}
    return {
        **{"prefix": f"model.layers.{i}.self_attn", "layer": i, "cache_index": i},
        "matched_error": _matched(0.4, 0.1 + i),
        "gain": {"points": [_gain_point(i), _gain_point(i + 1)]},
        "centring": centring | {"score_error": _errors(0.02), "output_error": _errors(0.03)},
    }


def _summary():
    judged = {"spearman": 0.97, "median_log_error": 0.13, "mean_log_error": 0.14}
    models = {"full": judged, "trace_only": judged, "cache_error_only": judged | {"spearman": None}}
    published = {"gamma": -0.075, "points": 4, "models": models}
    kind = {"ratio": 0.9, "interval": [0.8, 1.0], "mean": 0.91, "expected": 0.92}
    kinds = {k: kind | {"agree": 2, "layers": 2} for k in ("signs", "tokens", "isotropic")}
    share = {"matching": 0.6, "aggregation": 0.39, "interaction": 0.01, "nmse": 0.02}
    share |= {"matching_aggregation": 0.0, "matching_interaction": -0.001}
    share |= {"aggregation_interaction": 0.001}
    ratio = {"published": 1.6e-6, "centred": 1.9e-6}
    falls = {"score_error": {"centred": 4.0, "banded": 5.0}}
    return {
        "matched_error": _matched(0.8, 1.04)
        | {"cache_nmse": 0.01, "median_layer_ratio": 3.0, "sequences": 48},
        "gain": published
        | {"gamma": -0.2, "fitted_on": [0], "judged_on": [1], "published_gamma": published}
        | {"largest": {"identity_error": 2e-7}, "first_order_spearman": 0.999},
        "interventions": {"content": kinds, "rope": kinds},
        "split": {"content": share, "rope": share, "both": share, "joint": share},
        "bound": {"violations": 0, "cases": 288, "ratio": {"r2": ratio, "r4": ratio}},
        "centring": falls | {"page_mean_share": 0.64, "output_error": falls["score_error"]},
    }


def sensitivity():
    costs = [
        {"layer": i, "path": path, "bits": bits, "cost": 1e-3 / bits / (i + 1), "kl": 1e-3}
        for i in range(2)
        for path in ("content", "rope")
        for bits in (2, 4)
    ]
    plan = {"bytes_per_token": 94.0, "predicted_kl": 0.01, "measured_kl": 0.011}
    plan |= {"formats": {"0": "c4r4", "1": "c2r4"}}
    found = {"text": "calibration.txt", "windows": 8, "costs": costs}
    return found | {"plan": plan | {"budget": 94.0, "best_uniform": dict(plan)}}


def analysis():
    protocol = {"draws": 3, "repetitions": 8}
    return {
        **{"header": HEADER, "version": 1, "model": "nano", "model_sha256": SHA},
        **{"preset": "default", "protocol": protocol, "studies": ["gain"], "summary": _summary()},
        **{"predictor_spearman": 0.97, "layers": [_layer(0), _layer(1)]},
        "model_studies": {"sensitivity": sensitivity()},
    }


def bit_plan():
    rows = [
        {
            **{"name": name, "protected": protected, "bytes_per_token": 94.0},
            **{"predicted_kl": 0.01, "kl_mean": kl, "kl_error": 0.001},
        }
        for name, kl in (("c3r4", 0.012), ("plan", 0.009))
        for protected in (False, True)
    ]
    found = {"header": HEADER | {"windows": 8}, "rows": rows}
    return found | {key: sensitivity()[key] for key in ("costs", "plan")}


def calibration():
    row = {"shape": "DeepSeek-V2-Lite", "method": "quantmla", "tokens": 262144}
    return {"header": HEADER, "rows": [row | {"seconds": 12.47, "peak_gib": 3.16}]}


def study_times():
    row = {"shape": "DeepSeek-V2-Lite", "preset": "paper", "study": "gain", "sequences": 48}
    row |= {"tokens": 24576, "seconds": 0.924, "peak_gib": 1.54}
    return {"header": HEADER, "rows": [row, row | {"study": "move", "seconds": 0.03}]}


def decode():
    row = {"backend": "triton", "format": "c4r4", "heads": 16, "query_len": 1, "context": 32768}
    row |= {"batch": 32, "us": 467.94, "baseline": "fa3_mla", "baseline_us": 294.96, "ratio": 0.63}
    ours = row | {"backend": "cuda", "us": 163.87, "ratio": 1.8}
    return {"environment": ENVIRONMENT, "rows": [row, ours]}


def append():
    row = {"backend": "cuda", "format": "c4r4", "job": "tokens_256", "us": 6.4, "bytes": 589824}
    return {"environment": ENVIRONMENT, "rows": [row | {"gb_per_s": 91.9}]}


def native():
    row = {"cache": "native", "layers": 4, "batch": 8, "context": 16384, "ms_per_step": 6.8}
    return {"environment": ENVIRONMENT, "rows": [row]}


def serve():
    row = {
        "job": "32 x (2K + 512), plenty of room",
        "pool_tokens": 100_000,
        "preemptions": 3,
        "max_running": 8,
    }
    row |= {"ttft_p50": 1.5, "tpot_p50": 0.012, "tpot_p99": 0.05}
    pairs = (("bf16", 100.0), ("bf16", 110.0), ("c4r4", 250.0))
    rows = [row | {"variant": variant, "output_tok_s": speed} for variant, speed in pairs]
    return {"environment": ENVIRONMENT, "rows": rows}


def files_of(scale=1.0):
    """By name, one file of every kind."""
    return {
        "out/config.json": checkpoint(),
        "out/quantmla_log.json": log(scale),
        "out/quantmla_run.json": run_record(),
        "out/verify.json": verified(),
        "eval.json": evaluated(scale),
        "grid.json": grid(),
        "tasks.json": tasks(),
        "analysis.json": analysis(),
        "bit_plan.json": bit_plan(),
        "calibration.json": calibration(),
        "study_times.json": study_times(),
        "decode.json": decode(),
        "append.json": append(),
        "native.json": native(),
        "serve.json": serve(),
    }


def write_run(folder: Path, found=None):
    """A run folder with these files, by default one of every kind."""
    for name, data in (files_of() if found is None else found).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data))
    return folder
