"""Divergence by context on nano: every method, both formats, protected and not.

    python benchmarks/bench_context.py --work DIR [--out FILE] [--device auto] [--windows 4]

DIR holds nano-c4r4 and nano-c2r4 as `quantmla quantize nano --format ...` writes them (or as
bench_quality.py leaves them). The result has the form of `quantmla eval --json`; needles are left
out, so it takes a small part of bench_quality.py's time. Figures have eight significant digits.
"""

import argparse
import json
import platform
from datetime import date
from pathlib import Path
from typing import Any

from quantmla.arguments import new_or_old_file
from quantmla.device import resolve_device
from quantmla.doctor import gpus, versions
from quantmla.evaluation import Needles, evaluate
from quantmla.manifest import read_manifest
from quantmla.recipe import EvaluationRequest

ROOT = Path(__file__).parents[1]
FORMATS = ("c4r4", "c2r4")
DIGITS = 8


def as_text(document: dict[str, Any]) -> str:
    """One line of JSON."""
    short = json.loads(json.dumps(document), parse_float=lambda x: float(f"{float(x):.{DIGITS}g}"))
    return json.dumps(short, separators=(",", ":")) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=new_or_old_file)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--windows", type=int, default=4)
    args = parser.parse_args()
    device = resolve_device(args.device)
    rows, digest = [], None
    for name in FORMATS:
        folder = str(args.work / f"nano-{name}")
        config = json.loads((Path(folder) / "config.json").read_text())
        digest = read_manifest(config, folder)["base_sha256"]
        for bare in (True, False):
            request = EvaluationRequest(
                model=folder, baseline="nano", unprotected=bare, limit=args.windows, device=device
            )
            found = evaluate(request, progress=True, needles=Needles(of_each_kind=0))
            rows += [dict(row) for row in found if not rows or row["format"] != "bf16"]
    header = {
        "versions": versions(),
        "gpus": [gpu["name"] for gpu in gpus()] if device != "cpu" else [],
        "processor": platform.machine(),
        "model": "nano",
        "sha256": digest,
        "windows": args.windows,
        "needles_of_each_kind": 0,
    }
    path = args.out or ROOT / f"benchmarks/results/context_nano_{date.today():%Y%m%d}.json"
    path.write_text(as_text({"header": header, "rows": rows}))


if __name__ == "__main__":
    main()
