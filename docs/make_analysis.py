"""Writes the tables of docs/analysis.md and its figures: `python docs/make_analysis.py`.

Figures of nano from the newest benchmarks/results/analysis_nano_<yyyymmdd>.json, which is what
`quantmla analyze nano -o DIR` writes as DIR/analysis.json; times of one layer on a GPU from the
newest analysis_h200_<yyyymmdd>.json, by benchmarks/bench_analysis.py.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from charts import Axis, bars, heat_map, points
from markers import replace_in, replace_part

from quantmla.analysis.predictor import Point, with_own_gamma

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = Path(__file__).with_name("analysis.md")
FIGURES = Path(__file__).with_name("figures")
NAME = re.compile(r"analysis_nano_(\d{4})(\d{2})(\d{2})\.json")
TIMES = re.compile(r"analysis_h200_(\d{4})(\d{2})(\d{2})\.json")
PATHS = ("content", "rope")
KINDS = {"signs": "random signs", "tokens": "rows on other tokens", "isotropic": "isotropic"}
MODELS = {
    "full": "trace and allocation",
    "trace_only": "trace alone",
    "cache_error_only": "cache error alone",
}
Found = Mapping[str, Any]


def newest(pattern: re.Pattern[str] = NAME, folder: Path = RESULTS) -> Path:
    """The result file with the latest date in its name."""
    found = (path for path in folder.glob("*.json") if pattern.fullmatch(path.name))
    return max(found, key=lambda path: path.name)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def span(interval: Sequence[float], digits: str = ".2f") -> str:
    return f"{interval[0]:{digits}} to {interval[1]:{digits}}"


def source(path: Path, found: Found) -> str:
    match = NAME.fullmatch(path.name)
    assert match is not None
    header = found["header"]
    texts = " and ".join(f"`{text['name']}`" for text in found["texts"])
    sequences = found["summary"]["matched_error"]["sequences"]
    return (
        f"`nano`, {'-'.join(match.groups())}, preset `{found['preset']}`: {sequences} sequences of "
        f"{found['protocol']['length']} tokens from {texts}; torch {header['versions']['torch']}, "
        f"{', '.join(header['gpus']) or 'CPU'} ({header['machine']}), {header['cpu_threads']} "
        f"thread(s), {header['layer_cpu_seconds']:.0f} s of processor time for the studies; from "
        f"`benchmarks/results/{path.name}`."
    )


def matched(found: Found) -> str:
    rows = []
    for layer in found["layers"]:
        of = layer["matched_error"]
        cells = (f"{of['content']:.3f}", f"{of['rope']:.3f}", f"{of['ratio']:.2f}")
        rows.append([str(layer["layer"]), *cells, span(of["interval"])])
    of = found["summary"]["matched_error"]
    cells = (f"{of['content']:.3f}", f"{of['rope']:.3f}", f"**{of['ratio']:.2f}**")
    rows.append(["model", *cells, span(of["interval"])])
    words = f"The median layer's ratio is {of['median_layer_ratio']:.2f}."
    head = ("layer", "content", "rope", "rope / content", "95 % interval")
    return f"{table(head, rows)}\n\n{words}"


def predictor(found: Found) -> str:
    of = found["summary"]["gain"]
    layers = [[Point.of(p) for p in layer["gain"]["points"]] for layer in found["layers"]]
    own = [(with_own_gamma(layers, name), "its own") for name in MODELS if name != "full"]
    rows = []
    for record, words in ((of, "fitted"), *own, (of["published_gamma"], "published")):
        for name, errors in record["models"].items():
            title = MODELS[name]
            rank = "-" if errors["spearman"] is None else f"{errors['spearman']:.3f}"
            rows.append(
                [
                    title,
                    f"{words}, {record['gamma']:.3f}",
                    str(record["points"]),
                    rank,
                    f"{errors['median_log_error']:.3f}",
                    f"{errors['mean_log_error']:.3f}",
                ]
            )
    head = ("predicts", "gamma", "points", "Spearman", "median log error", "mean log error")
    return table(head, rows)


def identity(found: Found) -> str:
    rows = []
    for path in PATHS:
        values = [p[path] for layer in found["layers"] for p in layer["gain"]["points"]]
        allocation = sorted(v["allocation"] for v in values)
        cross = sorted(v["cross"] / v["gain"] for v in values)
        cells = [f"{median(allocation):.2f}", f"{allocation[0]:.2f} to {allocation[-1]:.2f}"]
        cells += [f"{median(cross):+.2f}", f"{cross[0]:+.2f} to {cross[-1]:+.2f}"]
        rows.append([path, *cells])
    of = found["summary"]["gain"]
    head = ("path", "A, median", "range", "O / G, median", "range")
    return table(head, rows) + (
        f"\n\nG = T A + O holds to {of['largest']['identity_error']:.0e} of G, with O from H e by "
        "a vector-Jacobian product; first order and finite gains have a rank correlation of "
        f"{of['first_order_spearman']:.4f}."
    )


def interventions(found: Found) -> str:
    rows = []
    for path in PATHS:
        for kind, title in KINDS.items():
            of = found["summary"]["interventions"][path][kind]
            rows.append(
                [
                    f"{path}: {title}",
                    f"{of['ratio']:.3f}",
                    span(of["interval"], ".3f"),
                    f"{of['mean']:.3f}",
                    f"{of['expected']:.3f}",
                    f"{of['agree']} of {of['layers']}",
                ]
            )
    head = ("error replaced by", "gain ratio", "95 % interval", "mean", "by theory", "agree")
    return table(head, rows)


def split(found: Found) -> str:
    parts = ("matching", "aggregation", "interaction")
    pairs = ("matching_aggregation", "matching_interaction", "aggregation_interaction")
    rows = []
    for name in (*PATHS, "both"):
        of = found["summary"]["split"][name]
        rows.append([name, *(f"{of[key]:+.4f}" for key in (*parts, *pairs)), f"{of['nmse']:.2e}"])
    head = ("quantised", *parts, "2 m·a", "2 m·i", "2 a·i", "output NMSE")
    joint = found["summary"]["split"]["joint"]
    words = (
        f"Of the joint error's squared norm {joint['content']:.3f} are the content path's, "
        f"{joint['rope']:.3f} the rope path's, {joint['content_rope']:+.4f} their product, and "
        f"{joint['beyond'] + joint['content_beyond'] + joint['rope_beyond']:+.4f} what neither has "
        "alone."
    )
    return f"{table(head, rows)}\n\n{words}"


def bound(found: Found) -> str:
    of = found["summary"]["bound"]
    rows = [
        [bits.upper(), f"{ratio['published']:.2e}", f"{ratio['centred']:.2e}"]
        for bits, ratio in of["ratio"].items()
    ]
    head = ("rope bits", "share of the published bound", "share of the centred bound")
    return table(head, rows) + f"\n\n{of['violations']} violations in {of['cases']} cases."


def centring(found: Found) -> str:
    rows = []
    for layer in found["layers"]:
        of, cells = layer["centring"], []
        for what in ("score_error", "output_error"):
            cells.append(f"{of[what]['plain']:.2e}")
            cells += [f"{of[what]['plain'] / of[what][name]:.1f}" for name in ("centred", "banded")]
        rows.append([str(layer["layer"]), f"{of['page_mean_share']:.0%}", *cells])
    of = found["summary"]["centring"]
    cells = []
    for what in ("score_error", "output_error"):
        cells += ["", *(f"**{of[what][name]:.1f}**" for name in ("centred", "banded"))]
    rows.append(["model", f"{of['page_mean_share']:.0%}", *cells])
    head = ("layer", "energy in page means", "score error, plain", "÷ centred", "÷ with bands")
    words = (
        "Rank correlation over layers of the share in page means with the score error's fall: "
        f"{of['share_gain_spearman']:.2f}."
    )
    body = table((*head, "output error, plain", "÷ centred", "÷ with bands"), rows)
    return f"{body}\n\n{words}"


def nano_time(found: Found) -> str:
    header = found["header"]
    return (
        f"On `nano` the studies of its {len(found['layers'])} layers took "
        f"{header['layer_seconds']:.0f} s, {header['layer_cpu_seconds']:.0f} s of them processor "
        f"time, with {header['cpu_threads']} thread(s) of a CPU ({header['machine']})."
    )


def layer_time(path: Path) -> str:
    """Seconds of each study of one layer, and their sum."""
    found = json.loads(path.read_text(encoding="utf-8"))
    match = TIMES.fullmatch(path.name)
    assert match is not None
    rows, header = found["rows"], found["header"]
    cells = [[row["study"], f"{row['seconds']:.3f}", f"{row['peak_gib']:.2f}"] for row in rows]
    cells.append(["all", f"**{sum(row['seconds'] for row in rows):.1f}**", ""])
    first, versions = rows[0], header["versions"]
    words = (
        f"One attention of {first['shape']}'s shape, preset `{first['preset']}`: "
        f"{first['sequences']} sequences, {first['tokens']:,} tokens. {', '.join(header['gpus'])}, "
        f"{'-'.join(match.groups())}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}; from `benchmarks/results/{path.name}`, one run."
    )
    return f"{table(('study', 'seconds', 'peak GiB'), cells)}\n\n{words}"


def response_figure(layers: Sequence[Found]) -> str:
    responses = {path: [layer["matched_error"][path] for layer in layers] for path in PATHS}
    every = [math.log10(value) for values in responses.values() for value in values]
    low, high = 10 ** math.floor(min(every)), 10 ** math.ceil(max(every))
    axis = Axis("output NMSE / cache NMSE", low, high, log=True)
    names = [str(layer["layer"]) for layer in layers]
    return bars("Response to a cache error of 1 %", axis, names, responses, "layer")


def predictor_figure(layers: Sequence[Found], gain: Found) -> str:
    dots: dict[str, list[tuple[float, float]]] = {"layers fitted on": [], "layers judged on": []}
    for index, layer in enumerate(layers):
        group = "layers fitted on" if index in gain["fitted_on"] else "layers judged on"
        for p in layer["gain"]["points"]:
            trace, allocation, measured = (
                math.log(p["rope"][key] / p["content"][key])
                for key in ("trace", "allocation", "finite_gain")
            )
            dots[group].append((trace + allocation + gain["gamma"], measured))
    flat = [value for of in dots.values() for dot in of for value in dot]
    edge = (min(flat) - 0.3, max(flat) + 0.3)
    axes = (Axis("predicted", *edge), Axis("measured", *edge))
    return points("Log of rope gain over content gain", axes, dots, joined=False)


def page_means_figure(pairs: Sequence[Found]) -> str:
    shares = [
        [min(1.0, m / e) for m, e in zip(of["page_mean"], of["energy"], strict=True)]
        for of in pairs
    ]
    labels = ("layer", "frequency pair, fastest first")
    return heat_map("Share of each pair's energy in page means", shares, labels)


def pair_errors_figure(pairs: Sequence[Found]) -> str:
    titles = {"plain": "plain", "centred": "page-centred", "banded": "in two bands"}
    count = len(pairs[0]["energy"])
    errors = {
        title: [
            (float(f), sum(of[f"error_{name}"][f] for of in pairs) / len(pairs))
            for f in range(count)
        ]
        for name, title in titles.items()
    }
    sizes = [value for of in errors.values() for _, value in of]
    axes = (
        Axis("frequency pair, fastest first", 0, count - 1),
        Axis("per token", min(sizes) * 0.8, max(sizes) * 1.25, log=True),
    )
    title = "Squared error of 4-bit rope keys by pair, mean over layers"
    return points(title, axes, errors, joined=True)


def figures(found: Found) -> dict[str, str]:
    """SVG by name."""
    pairs = [layer["centring"]["pairs"] for layer in found["layers"]]
    return {
        "response": response_figure(found["layers"]),
        "predictor": predictor_figure(found["layers"], found["summary"]["gain"]),
        "page_means": page_means_figure(pairs),
        "pair_errors": pair_errors_figure(pairs),
    }


PARTS = {
    "matched": matched,
    "predictor": predictor,
    "identity": identity,
    "interventions": interventions,
    "split": split,
    "bound": bound,
    "centring": centring,
    "nano time": nano_time,
}


def render(page: Path = PAGE) -> dict[Path, str]:
    """Every file as it should be."""
    path = newest()
    found = json.loads(path.read_text(encoding="utf-8"))
    text = replace_part(page, "source", source(path, found))
    for name, make in PARTS.items():
        text = replace_in(text, name, make(found))
    text = replace_in(text, "layer time", layer_time(newest(TIMES)))
    drawn = {FIGURES / f"analysis_{name}.svg": svg for name, svg in figures(found).items()}
    return {page: text} | drawn


if __name__ == "__main__":
    for path, text in render().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
