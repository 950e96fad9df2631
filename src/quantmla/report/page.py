"""report.json as one HTML file: nothing is loaded, and the only script switches the theme."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from quantmla.report.markup import NONE, Markup, Number, el, join, number, plain, table
from quantmla.report.sections import SECTIONS, section

Run = Mapping[str, Any]
FACTS = {"model": "model", "base_sha256": "sha256", "method": "method", "format": "cache format"}
SIGNS = {"better": "▲ better", "worse": "▼ worse", "same": "= same", "differs": "≠ differs"}
TILES = 6


def page(report: Mapping[str, Any]) -> str:
    """The whole file; the same report gives the same bytes."""
    runs = report["runs"]
    title = "QuantMLA report: " + ", ".join(run["name"] for run in runs)
    shown = [key for key in SECTIONS if any(key in run["sections"] for run in runs)]
    missing = [key for key in SECTIONS if key not in shown]
    body = el(
        "main",
        _header(report, title),
        _contents(shown, bool(report["comparison"])),
        _comparison(report) if report["comparison"] else _tiles(runs[0]),
        *(_section(key, runs) for key in shown),
        _missing(missing) if missing else None,
        _sources(runs),
        el("footer", f"Written by quantmla {report['quantmla']} from report.json."),
    )
    head = el(
        "head",
        Markup('<meta charset="utf-8"/>'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1"/>'),
        Markup('<meta name="color-scheme" content="light dark"/>'),
        el("title", title),
        el("style", _asset("page.css")),
    )
    whole = el("html", head, el("body", body, el("script", _asset("theme.js"))), lang="en")
    return f"<!DOCTYPE html>\n{whole}\n"


def _asset(name: str) -> Markup:
    text = (files("quantmla.report") / name).read_text(encoding="utf-8")
    return Markup("\n".join(line.strip() for line in text.splitlines() if line.strip()))


def _header(report: Mapping[str, Any], title: str) -> Markup:
    toggle = el("button", "Theme", id="theme", type="button", aria_label="Switch the colour theme")
    runs = report["runs"]
    facts = [_facts_table(runs)] if len(runs) > 1 else [_facts(runs[0])]
    return el("header", el("div", el("h1", title), toggle, class_="top"), *facts)


def _facts(run: Run) -> Markup:
    pairs = [(name, run["facts"][key]) for key, name in FACTS.items() if run["facts"][key]]
    return el(
        "dl", *(el("div", el("dt", n), el("dd", _short(v))) for n, v in pairs), class_="facts"
    )


def _short(value: str) -> str:
    """A hash by its first digits."""
    return f"{value[:12]}…" if len(value) == 64 else value


def _facts_table(runs: Sequence[Run]) -> Markup:
    body = []
    for key, name in FACTS.items():
        values = [run["facts"][key] for run in runs]
        mark = "" if len(set(values)) == 1 else "≠ "
        cells = [_short(value) if value else NONE for value in values]
        body.append([f"{mark}{name}", *cells])
    return table(["", *(run["name"] for run in runs)], body, caption="Runs; ≠ marks what differs")


def _contents(shown: Sequence[str], compared: bool) -> Markup:
    entries = [("comparison", "Comparison")] if compared else []
    entries += [(key, section(key).TITLE) for key in shown]
    entries.append(("sources", "Sources"))
    return el("nav", *(el("a", name, href=f"#{key}") for key, name in entries))


def _tiles(run: Run) -> Markup | None:
    """The first headlines, large."""
    lines = [line for line in run["headlines"] if line["value"] is not None][:TILES]
    tiles = [
        el("div", el("b", number(line["value"], line["spec"])), el("span", line["label"]))
        for line in lines
    ]
    return el("div", *tiles, class_="tiles") if tiles else None


def _comparison(report: Mapping[str, Any]) -> Markup:
    names = [run["name"] for run in report["runs"]]
    body = []
    for row in report["comparison"]:
        cells: list[object] = [row["label"], number(row["values"][0], row["spec"])]
        changes = zip(row["values"][1:], row["changes"], row["verdicts"], strict=True)
        cells += [_compared(value, row["spec"], change, word) for value, change, word in changes]
        body.append(cells)
    words = f"Changes are from {names[0]}; a sign says which way is better."
    shown = table(["", *names], body, caption="A column for each run")
    return el("section", el("h2", "Comparison"), el("p", words), shown, id="comparison")


def _compared(value: float | None, spec: str, change: float | None, verdict: str) -> Markup:
    """A value with a sign and its change from the first run's."""
    if value is None or verdict == "alone":
        return number(value, spec)
    sign, _, word = SIGNS[verdict].partition(" ")
    shown = plain(change, "+.1%")
    moved = verdict != "same" and change is not None
    words = el("data", shown, value=repr(change)) if moved else word
    return Number(join([number(value, spec), " ", el("span", sign, " ", words, class_=verdict)]))


def _section(key: str, runs: Sequence[Run]) -> Markup:
    """One run fills the width, several stand side by side."""
    part = section(key)
    heading = el("h2", part.TITLE)
    if len(runs) == 1:
        return el("section", heading, part.render(runs[0]["sections"][key]), id=key)
    columns = []
    for run in runs:
        data = run["sections"].get(key)
        inner = _command(part.COMMAND) if data is None else part.render(data)
        columns.append(el("div", el("h3", run["name"]), inner))
    return el("section", heading, el("div", *columns, class_="runs"), id=key)


def _command(command: str) -> Markup:
    return el("p", "No data. They come from ", el("code", command), class_="none")


def _missing(keys: Sequence[str]) -> Markup:
    lines = [el("li", f"{section(key).TITLE}: ", el("code", section(key).COMMAND)) for key in keys]
    return el("section", el("h2", "Not in this report"), el("ul", *lines), id="missing")


def _sources(runs: Sequence[Run]) -> Markup:
    body = [
        [
            f"{run['name']}/{file['name']}" if len(runs) > 1 else file["name"],
            file["kind"] if file["used"] else "not used",
            file["machine"] or NONE,
            ", ".join(f"{name} {value}" for name, value in file["versions"].items()) or NONE,
        ]
        for run in runs
        for file in run["files"]
    ]
    head = ("file", "kind", "machine", "versions")
    shown = table(head, body, caption="Files that the figures come from")
    return el("section", el("h2", "Sources"), shown, id="sources")
