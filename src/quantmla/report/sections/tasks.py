"""Standard tasks: scores with errors, recovery against bf16, paired comparisons."""

from collections.abc import Mapping, Sequence
from typing import Any

from quantmla.report.charts import Axis, Dot, dots, legend
from quantmla.report.collect import Record, RunFiles
from quantmla.report.markup import Markup, el, figure, figures, join, number, numbers, plain, table
from quantmla.report.provenance import answered, how, measured
from quantmla.report.sections import Data, Headline
from quantmla.report.sections.quality import colour
from quantmla.report.svg import MARKS

TITLE = "Tasks"
COMMAND = "quantmla eval OUT --tasks paper-general --data DIR -o RUN"
READS = ("tasks",)
NEEDLES = "niah"
SCORE = ("task", "variant", "metric", "score", "stderr", "recovery", "items")
NUMBERS = {"score", "stderr", "recovery", "items", "difference", "p"}
PAIR = ("task", "a", "b", "difference", "interval", "test", "p", "only_a", "only_b", "items")


def gather(run: RunFiles) -> Data | None:
    found = [part for part in map(_gather, run.of("tasks")) if part["results"]]
    return {"parts": found} if found else None


def _gather(record: Record) -> Data:
    data = record.data
    tasks = {t["name"]: t for t in data["tasks"] if not t["name"].startswith(NEEDLES)}
    settings = data["settings"]
    facts = {"repeats": 1, "seeds": None if settings.get("seed") is None else 1}
    return {
        "complete": data["complete"],
        "limit": settings.get("limit"),
        "variants": data["variants"],
        "tasks": [
            {
                key: task.get(key)
                for key in ("name", "shots", "metric", "definition", "items_in_all")
            }
            for task in tasks.values()
        ],
        "results": _only(data["results"], SCORE, tasks),
        "comparisons": _only(data.get("comparisons", ()), PAIR, tasks),
        "averages": list(data.get("averages", ())),
        "measured": measured(record, answered(settings, tasks.values()), **facts),
    }


def _only(
    rows: Sequence[Mapping[str, Any]], keys: Sequence[str], tasks: Mapping[str, Any]
) -> list[Data]:
    kept = [{key: row.get(key) for key in keys} for row in rows if row["task"] in tasks]
    for row in kept:
        for key in NUMBERS & set(keys):
            plain(row[key], ".3f")  # a TypeError or ValueError for what is no number
    return kept


def headlines(data: Mapping[str, Any]) -> list[Headline]:
    return [
        Headline(f"{row['task']} ({row['variant']})", row["score"], ".1%", "higher")
        for part in data["parts"]
        for row in part["results"]
        if row["variant"] != "bf16"
    ]


def render(data: Mapping[str, Any]) -> Markup:
    return join(_part(part) for part in data["parts"])


def variant_name(variant: Mapping[str, Any]) -> str:
    if variant["name"] == variant["format"]:
        return str(variant["name"])
    return f"{variant['name']} {variant['format'].upper()}"


def _part(part: Mapping[str, Any]) -> Markup:
    names = [variant["name"] for variant in part["variants"]]
    titles = [variant_name(variant) for variant in part["variants"]]
    found = {(row["task"], row["variant"]): row for row in part["results"]}
    head = ("task", "metric", "shots", "items", *titles, *(f"recovery, {t}" for t in titles[1:]))
    body = [_row(task, names, found) for task in part["tasks"]]
    notes = [] if part["complete"] else ["Not finished: more tasks were asked for."]
    notes += [f"At most {part['limit']} items a task."] if part["limit"] else []
    words = "± is the standard error over items; recovery the share of bf16's score. "
    return join(
        [
            el("p", words + " ".join(notes)),
            figures(_drawing(part)),
            table(head, body, caption="Scores"),
            _averages(part),
            _comparisons(part),
            how(part["measured"]),
        ]
    )


def _row(
    task: Mapping[str, Any], names: Sequence[str], found: Mapping[tuple[str, str], Any]
) -> list[object]:
    rows = [found.get((task["name"], name)) for name in names]
    items = next((row["items"] for row in rows if row), None)
    cells: list[object] = [task["name"], task["metric"]]
    cells += [number(task["shots"], "d"), number(items, ",d")]
    for row in rows:
        pair = (None, None) if row is None else (row["score"], row["stderr"])
        cells.append(numbers((pair[0], ".1%"), (pair[1], ".1%")))
    cells += [number(row["recovery"] if row else None, ".1%") for row in rows[1:]]
    return cells


def _averages(part: Mapping[str, Any]) -> Markup | None:
    if not part["averages"]:
        return None
    body = [
        [
            row["group"],
            row["variant"],
            ", ".join(row["tasks"]),
            number(row["score"], ".1%"),
            number(row["recovery"], ".1%"),
        ]
        for row in part["averages"]
    ]
    head = ("group", "variant", "mean over", "score", "recovery")
    return table(head, body, caption="Averages")


def _comparisons(part: Mapping[str, Any]) -> Markup | None:
    if not part["comparisons"]:
        return None
    body = [
        [
            row["task"],
            f"{row['b']} − {row['a']}",
            number(row["difference"], "+.1%"),
            numbers(*((v, "+.1%") for v in row["interval"]), between=" to "),
            number(row["only_a"], "d"),
            number(row["only_b"], "d"),
            number(row["p"], ".2g"),
            row["test"],
        ]
        for row in part["comparisons"]
    ]
    head = ("task", "pair", "difference", "95 % interval", "only first", "only second", "p", "test")
    title = "Paired comparisons on the same items"
    inner = table(head, body, caption=title)
    return el("details", el("summary", title), inner)


def _drawing(part: Mapping[str, Any]) -> Markup:
    found = {(row["task"], row["variant"]): row for row in part["results"]}
    drawn = []
    for task in part["tasks"]:
        for index, variant in enumerate(part["variants"]):
            row = found.get((task["name"], variant["name"]))
            if row is not None:
                drawn.append(
                    Dot(
                        label=task["name"],
                        value=100 * row["score"],
                        text=plain(row["score"], ".1%"),
                        colour=colour(row["variant"]),
                        interval=_around(row["score"], row["stderr"] or 0.0),
                        shape=MARKS[index % len(MARKS)],
                    )
                )
    axis = Axis(label="score, % (± one standard error)")
    key = legend([(variant_name(v), colour(v["name"])) for v in part["variants"]])
    drawing = join([dots(drawn, axis, "Scores by task"), key])
    return figure("Scores", drawing, how=how(part["measured"]))


def _around(score: float, error: float) -> tuple[float, float]:
    """One standard error to both sides, in percent; a score stays a share."""
    return 100 * max(score - error, 0.0), 100 * min(score + error, 1.0)
