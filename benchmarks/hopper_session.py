"""First looks at the Hopper kernel on one GPU: is it right, how fast are variants, what limits it.

    python benchmarks/hopper_session.py [--out FOLDER] [--seconds 170] [--only NAME ...]

Compiles all variants in parallel, then a worker process checks and times them one by one; a worker
that hangs or dies is replaced, and only the variant it was at is lost. Writes results.json and
notes.md and, if there is time, ncu.txt. For compute-sanitizer: --check FOLDER TRIAL --pool 2048.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

PAGE, RANK, ROPE, WINDOW_PAGES = 64, 512, 64, 4
POOL_PAGES = 65536  # 1.34 GB, 22 times the L2


@dataclass(frozen=True)
class Trial:
    name: str
    columns: int
    warpgroups: int
    stages: int
    tma: bool = True
    per_sm: int = 1
    defines: tuple[str, ...] = ()
    replace: tuple[tuple[str, str], ...] = ()
    right: bool = True  # False: a part of the work is left out, to see what it costs
    only_if_wrong: bool = False  # a fallback: tried if the first trial is wrong
    full: bool = False  # timed on every shape
    fmt: str = "c4r4"


NO_SCORES = (
    "    score_page(at, stage, means, s);\n",
    "    for (int i = 0; i < H2; i++) s[i] = as_float(lds32(stage + i * 4)) > 0;\n",
)
NO_VALUES = ("    value_page(at, stage, turn % 2, o);\n", "")
NO_SOFTMAX = (
    "    }\n    softmax(at, turn % 2, s, o, l);\n",
    "    }\n    for (int i = 0; i < H2; i++) l[0] += s[i];\n",
)
EARLY_SCORES = (
    "  prepare_scores(at, stage);\n  sync_warp();\n  score_offsets(at, means, s);\n"
    "  V4 first = ldmatrix(rows), next = ldmatrix(rows ^ 32);\n  mma_wait<0>();\n  settle(s);\n"
    "  score_group(at, first, 0, acc[0]);\n",
    "  V4 first = ldmatrix(rows), next = ldmatrix(rows ^ 32);\n"
    "  score_group(at, first, 0, acc[0]);\n"
    "  prepare_scores(at, stage);\n  sync_warp();\n  score_offsets(at, means, s);\n",
)
NO_MEAN = (
    "  for (int k = 0; k < 4; k++) mma<1>(s, mean[k], query_tile(MEAN_TILE + k));\n"
    "  mma_commit();\n}",
    "  mma_commit();\n}",
)
# the cost of reading nibbles of values as subnormals, scales aside: 9 instructions instead of 11
SUBNORMAL_VALUES = (
    "  v0 = hfma2(and_or(x << 4, 0x00f000f0, 0x54005400), scale, offset);\n"
    "  v1 = hfma2(and_or(x, 0x00f000f0, 0x54005400), scale, offset);\n"
    "  v2 = hfma2(and_or(x >> 4, 0x00f000f0, 0x54005400), scale, offset);\n"
    "  v3 = hfma2(and_or(x >> 8, 0x00f000f0, 0x54005400), scale, offset);\n",
    "  u32 y = x >> 8;\n"
    "  v0 = hfma2(x & 0x000f000f, scale, offset), v1 = hfma2(x & 0x00f000f0, scale, offset);\n"
    "  v2 = hfma2(y & 0x000f000f, scale, offset), v3 = hfma2(y & 0x00f000f0, scale, offset);\n",
)

TRIALS = (
    Trial("n16_wg3_st2", 16, 3, 2, full=True),
    Trial("n32_wg2_st3", 32, 2, 3, full=True),
    Trial("c2_n16_wg3_st2", 16, 3, 2, fmt="c2r4"),
    Trial("c2_n16_wg3_st3", 16, 3, 3, fmt="c2r4"),
    Trial("c2_n32_wg2_st3", 32, 2, 3, fmt="c2r4"),
    Trial("n16_wg3_st2_cpasync", 16, 3, 2, tma=False),
    Trial("n32_wg2_st3_cpasync", 32, 2, 3, tma=False, only_if_wrong=True),
    Trial("n16_wg2_st2_cpasync", 16, 2, 2, tma=False, only_if_wrong=True),
    Trial("n16_wg3_st2_swapped", 16, 3, 2, defines=("SWAP_STRIDES",), only_if_wrong=True),
    Trial(
        "n16_wg3_st2_swapped_cpasync",
        16,
        3,
        2,
        tma=False,
        defines=("SWAP_STRIDES",),
        only_if_wrong=True,
    ),
    Trial("n16_wg2_st2", 16, 2, 2),
    Trial("n16_wg2_st4", 16, 2, 4),
    Trial("n16_wg1_st2_x3", 16, 1, 2, per_sm=3, defines=("BLOCKS_PER_SM=3",)),
    Trial("n16_wg1_st3_x2", 16, 1, 3, per_sm=2, defines=("BLOCKS_PER_SM=2",)),
    Trial("n32_wg1_st2_x2", 32, 1, 2, per_sm=2, defines=("BLOCKS_PER_SM=2",)),
    Trial("n16_wg3_st2_means", 16, 3, 2, defines=("MEANS_AHEAD",), full=True),
    Trial("n32_wg2_st3_means", 32, 2, 3, defines=("MEANS_AHEAD",)),
    Trial("c2_n16_wg3_st2_means", 16, 3, 2, defines=("MEANS_AHEAD",), fmt="c2r4"),
    Trial("n16_wg3_st2_early", 16, 3, 2, replace=(EARLY_SCORES,)),
    Trial("n16_wg2_st3_early", 16, 2, 3, replace=(EARLY_SCORES,)),
    Trial("n32_wg2_st2", 32, 2, 2),
    Trial("n32_wg2_st3_early", 32, 2, 3, replace=(EARLY_SCORES,)),
    Trial("n16_no_mean", 16, 3, 2, replace=(NO_MEAN,), right=False),
    Trial("n16_subnormal_values", 16, 3, 2, replace=(SUBNORMAL_VALUES,), right=False),
    Trial("n16_loads_only", 16, 3, 2, replace=(NO_SCORES, NO_SOFTMAX, NO_VALUES), right=False),
    Trial("n16_no_values", 16, 3, 2, replace=(NO_VALUES,), right=False),
    Trial("n16_no_scores", 16, 3, 2, replace=(NO_SCORES,), right=False),
    Trial("n16_no_softmax", 16, 3, 2, replace=(NO_SOFTMAX,), right=False),
    Trial("n32_no_values", 32, 2, 3, replace=(NO_VALUES,), right=False),
    Trial("n32_no_scores", 32, 2, 3, replace=(NO_SCORES,), right=False),
)
# heads, context, batch
MAIN_SHAPE = {16: (16, 32768, 32), 32: (32, 32768, 32)}
SHAPES = {
    16: (
        (16, 32768, 32),
        (16, 8192, 32),
        (16, 131072, 1),
        (16, 131072, 8),
        (16, 32768, 1),
        (16, 8192, 1),
    ),
    32: ((32, 32768, 32), (64, 32768, 32), (128, 32768, 32), (32, 8192, 32), (32, 131072, 1)),
}
# heads, query length, lengths, splits
CHECKS = (
    (16, 1, (1, 63, 700, 5000), None),
    (16, 1, (300,), 1),
    (5, 3, (0, 129, 130, 191, 193, 4096), None),
    (64, 2, (2000, 65), 3),
)


def layout(fmt: str):
    from quantmla.quant.format import parse_format
    from quantmla.quant.layout import page_layout

    return page_layout(RANK, ROPE, parse_format(fmt))


# ---------------------------------------------------------------- compile


def prepare_trial(trial: Trial, folder: Path) -> str:
    """Writes source and macros for a compiler process; an error if a replacement does not apply."""
    from quantmla.kernels.cuda.build import Variant, defines, text

    variant = Variant(
        columns=trial.columns,
        warpgroups=trial.warpgroups,
        stages=trial.stages,
        tma=trial.tma,
        defines=trial.defines,
    )
    macros = defines(variant, layout(trial.fmt))
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

    def view(self, lengths, first_page: int = 0):
        from quantmla.cache.view import CacheView

        torch, batch = self.torch, len(lengths)
        need = [max(length, 1) // PAGE + 1 for length in lengths]
        table = torch.full((batch, max(need)), -1, dtype=torch.int32, device=self.device)
        order = torch.randperm(POOL_PAGES, generator=self.generator, device=self.device).int()
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

        shared = shared_bytes(trial.columns, trial.warpgroups, trial.stages, layout(trial.fmt))
        shared += trial.warpgroups * 256 * trial.columns * ("MEANS_AHEAD" in trial.defines)
        image = (self.folder / f"{trial.name}.cubin").read_bytes()
        return load(image, shared, self.device)

    def call(self, trial: Trial, loaded, query, view, splits=None):
        from quantmla.kernels.cuda.arguments import make_arguments, make_buffers
        from quantmla.kernels.cuda.launch import run

        blocks = self.multiprocessors * trial.per_sm
        buffers = make_buffers(query, splits, blocks, trial.columns)
        run(
            loaded,
            trial.warpgroups * 128,
            make_arguments(query, view, splits, buffers),
            view,
            blocks,
        )
        return buffers.out_BSNR, buffers.lse_BSN

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
        for _ in range(3):
            graph.replay()
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
        views = [self.view([context] * batch, first_page=i * pages) for i in range(sets)]
        us = self.microseconds([lambda v=v: self.call(trial, loaded, query, v) for v in views])
        ps = us * 1e6 / (context * batch)
        self.note(
            kind="time",
            trial=trial.name,
            heads=heads,
            context=context,
            batch=batch,
            us=us,
            ps_per_token=ps,
            right=trial.right,
            format=trial.fmt,
            terabytes_per_second=layout(trial.fmt).page_bytes / PAGE * context * batch / us / 1e6,
        )

    def trial(self, trial: Trial) -> None:
        self.use(trial.fmt)
        loaded = self.load(trial)
        good = self.check(trial, loaded) if trial.right else True
        self.note(kind="checked", trial=trial.name, good=good)
        if trial.only_if_wrong and not good:
            return
        for shape in SHAPES[trial.columns] if trial.full else (MAIN_SHAPE[trial.columns],):
            self.time(trial, loaded, shape)


def work(folder: Path, names: list[str]) -> None:
    worker = Worker(folder)
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


def run_worker(folder: Path, names: list[str], deadline: float) -> list[str]:
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
        if time.time() - last > 12:
            break
    if process.poll() is None:
        process.kill()
        process.wait()
    started = [row["trial"] for row in rows_of(folder) if row["kind"] == "start"]
    return [name for name in names if name not in started] if started else names[1:]


def after_failure(
    folder: Path, left: list[str], fallbacks: list[str]
) -> tuple[list[str], list[str]]:
    """If nothing worked yet, fallbacks come first; if TMA hung, nothing with it is tried again."""
    rows, by_name = rows_of(folder), {t.name: t for t in TRIALS}
    good = [by_name[row["trial"]] for row in rows if row["kind"] == "checked" and row["good"]]
    if any(t.right for t in good) or not fallbacks:
        return left, fallbacks
    done = {row["trial"] for row in rows if row["kind"] in ("end", "failed")}
    hung = any(
        row["kind"] == "start" and row["trial"] not in done and by_name[row["trial"]].tma
        for row in rows
    )
    names = fallbacks + left
    return [n for n in names if not (hung and by_name[n].tma)], []


def report(folder: Path, errors: dict[str, str]) -> str:
    rows = rows_of(folder)
    lines = [
        "| trial | right | shape (heads, context x batch) | us | ps per token | TB/s |",
        "|---|---|---|---|---|---|",
    ]
    good = {row["trial"]: row["good"] for row in rows if row["kind"] == "checked"}
    for row in rows:
        if row["kind"] == "time":
            right = "part" if not row["right"] else "yes" if good.get(row["trial"]) else "NO"
            cells = (row["trial"], right, f"{row['heads']}, {row['context']} x {row['batch']}")
            numbers = (row["us"], row["ps_per_token"], row["terabytes_per_second"])
            lines.append("| " + " | ".join([*cells, *(f"{x:.2f}" for x in numbers)]) + " |")
    lines += ["", "Checks: relative error of the output, error of the LSE, same bits twice", ""]
    for row in rows:
        if row["kind"] == "check":
            shape = f"{row['trial']} h{row['heads']} q{row['query_len']} {row['lengths']}"
            result = f"{row['error']:.2e} {row['lse_error']:.1e} {row['same']}"
            lines.append(f"- {shape}: {result}{'' if row['passed'] else ' WRONG'}")
    ended = {row["trial"] for row in rows if row["kind"] in ("end", "failed")}
    for row in rows:
        if row["kind"] == "failed":
            lines.append(f"- failed: {row['trial']}: {row['error']}")
        if row["kind"] == "start" and row["trial"] not in ended:
            lines.append(f"- hung or died: {row['trial']}")
    lines += [f"- not compiled: {name}: {error}" for name, error in errors.items() if error]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--seconds", type=float, default=165)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--pool", type=int, default=POOL_PAGES, help="pages of 64 tokens")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--compile", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument(
        "--profile", nargs=2, metavar=("FOLDER", "TRIAL"), help="two calls of one trial"
    )
    parser.add_argument(
        "--check", nargs=2, metavar=("FOLDER", "TRIAL"), help="the checks of one trial"
    )
    args = parser.parse_args()
    globals()["POOL_PAGES"] = args.pool
    if args.work:
        return work(Path(args.work[0]), args.work[1:])
    if args.compile:
        return compile_job(Path(args.compile[0]), args.compile[1])
    if args.profile or args.check:
        folder, name = args.profile or args.check
        return single(Path(folder), name, bool(args.check))
    start = time.time()
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    trials = [t for t in TRIALS if not args.only or t.name in args.only]
    errors = compile_all(trials, folder)
    print(
        f"compiled in {time.time() - start:.1f} s",
        {n: e for n, e in errors.items() if e},
        flush=True,
    )
    able = [t for t in trials if not errors[t.name]]
    left = [t.name for t in able if not t.only_if_wrong]
    deadline = start + args.seconds - 35
    fallbacks = [t.name for t in able if t.only_if_wrong]
    while left and time.time() < deadline:
        left = run_worker(folder, left, deadline)
        left, fallbacks = after_failure(folder, left, fallbacks)
    if able and time.time() < start + args.seconds - 25:
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
        with open(folder / "ncu.txt", "w") as out:
            try:
                limit = max(10, start + args.seconds - time.time())
                subprocess.run(
                    [*command, sys.executable, __file__, "--profile", str(folder), able[0].name],
                    stdout=out,
                    stderr=out,
                    timeout=limit,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                out.write(str(error))
    text = report(folder, errors)
    (folder / "notes.md").write_text(text + "\n")
    (folder / "results.json").write_text(json.dumps(rows_of(folder), indent=1))
    for path in folder.glob("*.cubin"):
        path.unlink()
    print(text)
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
