"""Keeps the small result files of one `quantize` run: `python benchmarks/record_run.py OUT`.

They go to benchmarks/results/NAME, where NAME is OUT's, with what `verify` finds as verify.json.
Weights, tokenizer, transforms and recipe stay where they are. The log is kept to six digits.
"""

import argparse
import json
import platform
import shutil
from pathlib import Path

from quantmla import pipeline
from quantmla.arguments import run_script
from quantmla.doctor import gpus, versions
from quantmla.errors import UsageError, require

RESULTS = Path(__file__).with_name("results")
LOG = "quantmla_log.json"
KEPT = ("config.json", "quantmla_run.json")
DIGITS = 6


def shortened(text: str) -> str:
    """The same JSON without blanks, its figures to `DIGITS` significant digits."""
    found = json.loads(text, parse_float=lambda x: float(f"{float(x):.{DIGITS}g}"))
    return json.dumps(found, separators=(",", ":")) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="a folder that quantize wrote")
    run_script(parser, run)


def run(options: argparse.Namespace) -> None:
    out = options.output.absolute()
    for name in (*KEPT, LOG):
        require(
            (out / name).is_file(), f"{out} is no folder that quantize wrote: no {name}", UsageError
        )
    found = pipeline.verify(str(out), against=None)
    header = {
        "versions": versions(),
        "gpus": [gpu["name"] for gpu in gpus()],
        "processor": platform.machine(),
    }
    folder = RESULTS / out.name
    folder.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        shutil.copyfile(out / name, folder / name)
    (folder / LOG).write_text(shortened((out / LOG).read_text()))
    text = json.dumps({"header": header, **found}, indent=1) + "\n"
    (folder / "verify.json").write_text(text)
    print(folder)


if __name__ == "__main__":
    main()
