"""First looks at the Hopper kernel on one GPU: is it right, how fast are variants, what limits it.

    python benchmarks/hopper_session.py [--out FOLDER] [--seconds 170] [--only NAME ...]

Compiles all variants in parallel, then a worker process checks and times them one by one; a worker
that hangs or dies is replaced, and only the variant it was at is lost. Writes results.json, as
results come, then notes.md and, if there is time, ncu.txt; the rest is in a temporary folder.
For compute-sanitizer: --check FOLDER TRIAL --pool 2048.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hopper_trace
from hopper_trials import CHECKS, MAIN_SHAPE, SHAPES, TRIALS, Trial

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

PAGE, RANK, ROPE, WINDOW_PAGES = 64, 512, 64, 4
POOL_PAGES = 65536  # 1.34 GB, 22 times the L2


def layout(fmt: str):
    from quantmla.quant.format import parse_format
    from quantmla.quant.layout import page_layout

    return page_layout(RANK, ROPE, parse_format(fmt))


# ---------------------------------------------------------------- compile


def variant_of(trial: Trial):
    from quantmla.kernels.cuda.build import Variant

    return Variant(
        columns=trial.columns,
        warpgroups=trial.warpgroups,
        stages=trial.stages,
        defines=trial.defines,
    )


def prepare_trial(trial: Trial, folder: Path) -> str:
    """Writes source and macros for a compiler process; an error if a replacement does not apply."""
    from quantmla.kernels.cuda.build import defines, text

    macros = defines(variant_of(trial), layout(trial.fmt))
    code = text(macros)
    for old, new in trial.replace:
        if old not in code:
            return f"cannot replace {old!r}"
        code = code.replace(old, new)
    job = {"code": code, "macros": macros}
    (folder / f"{trial.name}.job").write_text(json.dumps(job))
    return ""


def compile_job(folder: Path, name: str) -> None:
    from quantmla.kernels.cuda.build import compile_text

    job = json.loads((folder / f"{name}.job").read_text())
    (folder / f"{name}.cubin").write_bytes(compile_text(job["code"], tuple(job["macros"])))


def compile_all(trials: list[Trial], folder: Path) -> dict[str, str]:
    """In parallel processes; errors by name."""
    errors = {trial.name: prepare_trial(trial, folder) for trial in trials}

    def one(name: str) -> str:
        command = [sys.executable, __file__, "--compile", str(folder), name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return done.stderr[-1500:] if done.returncode else ""

    names = [name for name, error in errors.items() if not error]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        errors.update(zip(names, pool.map(one, names), strict=True))
    return errors


# ---------------------------------------------------------------- worker


def prefer_shared(kernel, percent: int) -> None:
    """A kernel's share of L1 for shared memory; if two have the same, it need not change."""
    from cuda.bindings import driver

    from quantmla.kernels.cuda.launch import check

    name = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    check(driver.cuFuncSetAttribute(kernel, name, percent))


class Worker:
    def __init__(self, folder: Path) -> None:
        import torch

        from quantmla.quant.format import parse_format

        self.torch, self.folder, self.fmt = torch, folder, parse_format("c4r4")
        self.pools = {}
        self.device = torch.device("cuda:0")
        self.generator = torch.Generator(self.device).manual_seed(1)
        torch.cuda.init()
        self.multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count

    def note(self, **row) -> None:
        with open(self.folder / "rows.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")

    def rand(self, *shape):
        return self.torch.randn(*shape, generator=self.generator, device=self.device)

    def use(self, fmt: str) -> None:
        from quantmla.quant.format import parse_format

        self.fmt = parse_format(fmt)

    def pages(self):
        """Random pages with plausible scales."""
        torch, lay, g, device = self.torch, layout(self.fmt.name), self.generator, self.device
        if self.fmt.name not in self.pools:
            self.pools.clear()
            pool = torch.randint(
                0, 256, (POOL_PAGES, lay.page_bytes), dtype=torch.uint8, device=device, generator=g
            )
            shape, top = (
                (POOL_PAGES, (lay.content_groups + lay.rope_groups) * PAGE),
                2**self.fmt.content_bits,
            )
            scales = (torch.rand(shape, device=device, generator=g) * 4 / top + 0.05).half()
            pool[:, lay.scales] = scales.view(torch.uint8)
            pool[:, lay.zero_points] = torch.randint(
                0, top, shape, dtype=torch.uint8, device=device, generator=g
            )
            pool[:, lay.mean] = self.rand(POOL_PAGES, ROPE).half().view(torch.uint8)
            self.pools[self.fmt.name] = pool
        return self.pools[self.fmt.name]

    def view(self, lengths, first_page: int = 0, pool: int = 0, shuffled: bool = True):
        from quantmla.cache.view import CacheView

        torch, batch = self.torch, len(lengths)
        need = [max(length, 1) // PAGE + 1 for length in lengths]
        table = torch.full((batch, max(need)), -1, dtype=torch.int32, device=self.device)
        order = torch.randperm(POOL_PAGES, generator=self.generator, device=self.device).int()
        order = (order if shuffled else order.sort().values) % (pool or POOL_PAGES)
        at = first_page
        for b, count in enumerate(need):
            table[b, :count] = order[torch.arange(at, at + count, device=self.device) % POOL_PAGES]
            at += count
        window = self.rand(batch * (WINDOW_PAGES + 1), PAGE, RANK + ROPE).bfloat16()
        numbers = torch.randperm(
            batch * (WINDOW_PAGES + 1), generator=self.generator, device=self.device
        ).int()
        return CacheView(
            fmt=self.fmt,
            kv_lora_rank=RANK,
            pages_JY=self.pages(),
            block_table_BJ=table,
            lengths_B=torch.tensor(lengths, dtype=torch.int32, device=self.device),
            window_pages_JMC=window,
            window_table_BW=numbers[: batch * WINDOW_PAGES].view(batch, WINDOW_PAGES),
            sink_pages_B=numbers[batch * WINDOW_PAGES :],
        )

    def query(self, batch: int, query_len: int, heads: int):
        from quantmla.kernels.problem import DecodeQuery

        latent, rope = (
            self.rand(batch, query_len, heads, RANK),
            self.rand(batch, query_len, heads, ROPE),
        )
        return DecodeQuery(latent.bfloat16(), rope.bfloat16(), 0.05)

    def load(self, trial: Trial):
        from quantmla.kernels.cuda.arguments import shared_bytes
        from quantmla.kernels.cuda.launch import load

        shared = shared_bytes(variant_of(trial), layout(trial.fmt))
        image = (self.folder / f"{trial.name}.cubin").read_bytes()
        loaded = load(image, shared, self.device)
        if trial.carveout >= 0:
            prefer_shared(loaded.combine, trial.carveout)
        return loaded

    def call(self, trial: Trial, loaded, query, view, splits=None):
        from quantmla.kernels.cuda.backend import DecodeRun

        run = DecodeRun(loaded, variant_of(trial), query, view, splits)
        return run(query, view.pages_JY, view.window_pages_JMC)

    def check(self, trial: Trial, loaded) -> bool:
        """Against the reference in float64, twice: it must be right, and give the same bits."""
        from quantmla.kernels import reference
        from quantmla.kernels.problem import DecodeQuery

        torch, good = self.torch, True
        for heads, query_len, lengths, splits in CHECKS:
            view, query = self.view(lengths), self.query(len(lengths), query_len, heads)
            out, lse = self.call(trial, loaded, query, view, splits)
            again, _ = self.call(trial, loaded, query, view, splits)
            torch.cuda.synchronize()
            exact = reference.decode(
                DecodeQuery(query[0].double(), query[1].double(), query[2]), view
            )
            error = ((out.double() - exact.out_BSNR).norm() / exact.out_BSNR.norm()).item()
            finite = exact.lse_BSN.isfinite()
            lse_error = (lse.double() - exact.lse_BSN)[finite].abs().max().item()
            same = torch.equal(out, again) and bool((lse.isinf() == ~finite).all())
            passed = error < 0.01 and lse_error < 0.03 and same
            good &= passed
            row = {"heads": heads, "query_len": query_len, "lengths": lengths, "splits": splits}
            self.note(
                kind="check",
                trial=trial.name,
                error=error,
                lse_error=lse_error,
                same=same,
                passed=passed,
                **row,
            )
        return good

    def microseconds(self, calls, replays: int = 15) -> float:
        """Median time of one call in a graph of them all; they read different pages."""
        torch = self.torch
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        warm = time.time()
        while time.time() < warm + 0.06:  # until clocks are up
            graph.replay()
            torch.cuda.synchronize()
        times = []
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1000 / len(calls))
        return sorted(times)[len(times) // 2]

    def time(self, trial: Trial, loaded, shape) -> None:
        heads, context, batch = shape
        query = self.query(batch, 1, heads)
        pages = context * batch // PAGE
        sets = max(2, min(24, POOL_PAGES // pages))
        views = [
            self.view([context] * batch, i * pages, trial.pool, trial.shuffled) for i in range(sets)
        ]
        us = self.microseconds([lambda v=v: self.call(trial, loaded, query, v) for v in views])
        ps = us * 1e6 / (context * batch)
        bytes_read = layout(trial.fmt).page_bytes / PAGE * context * batch
        row = {
            "kind": "time",
            "trial": trial.name,
            "heads": heads,
            "context": context,
            "batch": batch,
            "us": us,
            "ps_per_token": ps,
            "right": trial.right,
            "format": trial.fmt,
            "terabytes_per_second": bytes_read / us / 1e6,
        }
        if trial.traced:
            hopper_trace.clear(loaded.module)
            for view in views:
                self.call(trial, loaded, query, view)
            self.torch.cuda.synchronize()
            row["trace"] = hopper_trace.read(loaded.module)
        self.note(**row)

    def trial(self, trial: Trial) -> None:
        self.use(trial.fmt)
        loaded = self.load(trial)
        good = self.check(trial, loaded) if trial.right else True
        self.note(kind="checked", trial=trial.name, good=good)
        usual = SHAPES[trial.columns] if trial.full else (MAIN_SHAPE[trial.columns],)
        for shape in trial.shapes or usual:
            self.time(trial, loaded, shape)


def machine() -> dict:
    import torch

    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm", "--format=csv,noheader"]
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver, clock": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def work(folder: Path, names: list[str]) -> None:
    worker = Worker(folder)
    worker.note(kind="machine", **machine())
    for name in names:
        trial = next(t for t in TRIALS if t.name == name)
        worker.note(kind="start", trial=name, at=time.time())
        try:
            worker.trial(trial)
            worker.note(kind="end", trial=name)
        except Exception as error:
            worker.note(kind="failed", trial=name, error=str(error)[:500])
            if "CUDA" in str(error):  # the context is lost
                raise


def single(folder: Path, name: str, checks: bool) -> None:
    """Two calls of one trial, or its checks, for a profiler or a sanitizer."""
    folder.mkdir(parents=True, exist_ok=True)
    worker = Worker(folder)
    trial = next(t for t in TRIALS if t.name == name)
    worker.use(trial.fmt)
    if not (folder / f"{name}.cubin").exists():
        print(compile_all([trial], folder))
    loaded = worker.load(trial)
    if checks:
        print(worker.check(trial, loaded))
        return
    heads, context, batch = MAIN_SHAPE[trial.columns]
    view, query = worker.view([context] * batch), worker.query(batch, 1, heads)
    for _ in range(2):
        worker.call(trial, loaded, query, view)
    worker.torch.cuda.synchronize()


# ---------------------------------------------------------------- master


def rows_of(folder: Path) -> list[dict]:
    path = folder / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def published(rows: list[dict]) -> list[dict]:
    """What a result file keeps: of a trial's checks how many there were, and the worst."""
    checks: dict[str, list[dict]] = {}
    for row in rows:
        if row["kind"] == "check":
            checks.setdefault(row["trial"], []).append(row)
    kept = []
    for row in rows:
        if row["kind"] == "checked" and row["trial"] in checks:
            each = checks[row["trial"]]
            row = row | {"checks": len(each), "all_passed": all(c["passed"] for c in each)}
            row |= {key: round(max(c[key] for c in each), 6) for key in ("error", "lse_error")}
        if row["kind"] not in ("start", "end", "check"):
            kept.append(row)
    return kept


def write_results(folder: Path, out: Path) -> None:
    """All rows so far; beside, then renamed, so that there is always a whole file."""
    rows = folder / "results.json"
    lines = (json.dumps(row, separators=(",", ":")) for row in published(rows_of(folder)))
    rows.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    part = out / "results.json.part"
    shutil.copyfile(rows, part)
    part.replace(out / "results.json")


def run_worker(folder: Path, out: Path, names: list[str], deadline: float) -> list[str]:
    """Runs trials; returns those still to do when the worker ended, without the one it was at."""
    log = open(folder / "worker.log", "a")  # noqa: SIM115 - the worker's, as long as it runs
    process = subprocess.Popen(
        [sys.executable, __file__, "--work", str(folder), *names], stdout=log, stderr=log
    )
    last, seen = time.time() + 35, 0  # torch and the pool take a while
    while process.poll() is None and time.time() < deadline:
        time.sleep(0.2)
        count = len(rows_of(folder))
        if count > seen:
            seen, last = count, time.time()
            write_results(folder, out)
        if time.time() - last > 12:
            break
    if process.poll() is None:
        process.kill()
        process.wait()
    started = [row["trial"] for row in rows_of(folder) if row["kind"] == "start"]
    return [name for name in names if name not in started] if started else names[1:]


def time_lines(rows: list[dict]) -> list[str]:
    good = {row["trial"]: row["good"] for row in rows if row["kind"] == "checked"}
    lines = [
        "| trial | right | shape (heads, context x batch) | us | ps per token | TB/s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["kind"] == "time":
            right = "part" if not row["right"] else "yes" if good.get(row["trial"]) else "NO"
            cells = (row["trial"], right, f"{row['heads']}, {row['context']} x {row['batch']}")
            numbers = (row["us"], row["ps_per_token"], row["terabytes_per_second"])
            lines.append("| " + " | ".join([*cells, *(f"{x:.2f}" for x in numbers)]) + " |")
    return lines


def check_lines(rows: list[dict]) -> list[str]:
    lines = ["", "Checks, the worst: relative error, error of the LSE, same bits twice", ""]
    checks: dict[str, list[dict]] = {}
    for row in rows:
        if row["kind"] == "check":
            checks.setdefault(row["trial"], []).append(row)
    for name, found in checks.items():
        error, lse = max(r["error"] for r in found), max(r["lse_error"] for r in found)
        wrong = [r["lengths"] for r in found if not r["passed"]]
        result = f"{error:.2e} {lse:.1e} {all(r['same'] for r in found)}"
        lines.append(f"- {name}: {result}" + (f" WRONG: {wrong}" if wrong else ""))
    return lines


def trace_lines(rows: list[dict]) -> list[str]:
    lines = ["", "Traces: least, median, mean, most, how many", ""]
    for row in rows:
        if "trace" in row:
            lines.append(f"- {row['trial']}, {row['heads']}, {row['context']} x {row['batch']}")
            lines += [f"  - {name}: {phases}" for name, phases in row["trace"].items()]
    return lines


def failure_lines(rows: list[dict], errors: dict[str, str]) -> list[str]:
    lines = [f"- failed: {r['trial']}: {r['error']}" for r in rows if r["kind"] == "failed"]
    ended = {row["trial"] for row in rows if row["kind"] in ("end", "failed")}
    started = [row["trial"] for row in rows if row["kind"] == "start"]
    lines += [f"- hung or died: {name}" for name in started if name not in ended]
    return lines + [f"- not compiled: {name}: {error}" for name, error in errors.items() if error]


def report(folder: Path, errors: dict[str, str]) -> str:
    rows = rows_of(folder)
    parts = (time_lines(rows), check_lines(rows), trace_lines(rows), failure_lines(rows, errors))
    return "\n".join(line for lines in parts for line in lines)


def profile(folder: Path, out: Path, name: str, seconds: float) -> None:
    """What Nsight Compute says of one launch."""
    command = ["ncu", "--clock-control", "none", "-k", "regex:decode", "-s", "1", "-c", "1"]
    for section in (
        "SpeedOfLight",
        "WarpStateStats",
        "ComputeWorkloadAnalysis",
        "MemoryWorkloadAnalysis",
        "SchedulerStats",
        "InstructionStats",
    ):
        command += ["--section", section]
    command += [sys.executable, __file__, "--profile", str(folder), name]
    with open(out / "ncu.txt", "w") as text:
        try:
            subprocess.run(command, stdout=text, stderr=text, timeout=max(10, seconds))
        except (OSError, subprocess.TimeoutExpired) as error:
            text.write(str(error))


def session(folder: Path, out: Path, trials: list[Trial], seconds: float) -> None:
    start = time.time()
    errors = compile_all(trials, folder)
    failed = {n: e for n, e in errors.items() if e}
    print(f"compiled in {time.time() - start:.1f} s", failed, flush=True)
    able = [t for t in trials if not errors[t.name]]
    left = [t.name for t in able]
    deadline = start + seconds - 35
    while left and time.time() < deadline:
        left = run_worker(folder, out, left, deadline)
    write_results(folder, out)
    text = report(folder, errors) + (f"\n- no time for: {left}" if left else "")
    (out / "notes.md").write_text(text + "\n")
    if able and time.time() < start + seconds - 25:
        profile(folder, out, able[0].name, start + seconds - time.time())
    print(text)
    if (folder / "worker.log").exists():  # else there was no time for any
        print((folder / "worker.log").read_text()[-1500:])
    print(f"{time.time() - start:.0f} s")


def main() -> None:
    from quantmla.arguments import positive, run_script, seconds

    names = [trial.name for trial in TRIALS]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--seconds", type=seconds, default=165)
    parser.add_argument("--only", nargs="*", choices=names, metavar="TRIAL")
    parser.add_argument("--pool", type=positive, default=POOL_PAGES, help="pages of 64 tokens")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--compile", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument(
        "--profile", nargs=2, metavar=("FOLDER", "TRIAL"), help="two calls of one trial"
    )
    parser.add_argument(
        "--check", nargs=2, metavar=("FOLDER", "TRIAL"), help="the checks of one trial"
    )
    parser.add_argument("--short", action="store_true", help="checks of few tokens alone")
    run_script(parser, run)


def run(args: argparse.Namespace) -> None:
    globals()["POOL_PAGES"] = args.pool
    if args.compile:
        return compile_job(Path(args.compile[0]), args.compile[1])
    import torch

    from quantmla.errors import UsageError, require
    from quantmla.workdir import check_makeable

    require(torch.cuda.is_available(), "needs a Hopper GPU, and torch sees none", UsageError)
    if args.work:
        return work(Path(args.work[0]), args.work[1:])
    if args.profile or args.check:
        folder, name = args.profile or args.check
        known = name in [trial.name for trial in TRIALS]
        require(known, f"no trial is named {name!r}", UsageError)
        if args.short:
            CHECKS[:] = [check for check in CHECKS if sum(check[2]) < 2500]
        return single(Path(folder), name, bool(args.check))
    out = Path(args.out)
    check_makeable(out, out)
    out.mkdir(parents=True, exist_ok=True)
    trials = [t for t in TRIALS if not args.only or t.name in args.only]
    with tempfile.TemporaryDirectory() as folder:
        session(Path(folder), out, trials, args.seconds)


if __name__ == "__main__":
    main()
