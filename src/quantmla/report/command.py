"""Flags of `quantmla report` and what it runs."""

import argparse


def report_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", help="a folder of results; several are compared")
    add("-o", "--output", metavar="FILE", default="report.html", help="page (default: report.html)")
    add("--overwrite", action="store_true", help="replace files that are no earlier report")
    add("--json", action="store_true", help="print JSON instead of text")


def report_command(args: argparse.Namespace) -> int:
    from quantmla import present
    from quantmla.report.write import write_report

    written = write_report(args.runs, args.output, overwrite=args.overwrite)
    present.show(written, as_json=args.json)
    return 0
