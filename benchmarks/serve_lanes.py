"""Engines side by side on one GPU, of which one at a time runs a job."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import Any, NamedTuple

from serve_jobs import Group, Job
from serve_worker import MARK

WORKER = Path(__file__).with_name("serve_worker.py")
START_SECONDS = 240  # after which those that are ready begin without the others
JOB_SECONDS = 150  # of a job that nobody has run yet: an engine that takes longer hangs
Row = dict[str, Any]


class Engine(NamedTuple):
    """What a process serves."""

    group: Group
    variant: str


class Task(NamedTuple):
    engine: Engine
    job: Job
    repeat: int


class Worker:
    """The driver's end of a process of serve_worker.py."""

    def __init__(self, engine: Engine, flags: Sequence[str], environment: Mapping[str, str]):
        command = [sys.executable, str(WORKER), engine.group.name, engine.variant, *flags]
        self.name = f"{engine.group.name} {engine.variant}"
        self.process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            bufsize=1,
        )
        self.messages: Queue[Row] = Queue()
        self.state = "starting"  # then "ready", at last "gone"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                self.messages.put(json.loads(line.removeprefix(MARK)))
            elif line.strip():
                print(f"[{self.name}] {line.rstrip()}", flush=True)
        self.messages.put({"gone": self.process.wait()})

    def hear(self, seconds: float) -> Row | None:
        """The next message, if one comes in time."""
        try:
            message = self.messages.get(timeout=max(0.0, seconds))
        except Empty:
            return None
        if "gone" in message:
            self.state = "gone"
            print(f"{self.name}: exit code {message['gone']}", flush=True)
        elif "ready" in message:
            self.state = "ready"
        return message

    def ask(self, task: Task, until: float) -> Row | None:
        """The row of a job; None where there is none: it failed, or time ran out."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([task.job.name, task.repeat]) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.hear(1.0)
            return None
        message = self.hear(until - time.time())
        if message is None:
            print(f"{self.name}: out of time in {task.job.name}", flush=True)
            self.stop()
            return None
        if "failed" in message:
            print(f"{self.name}: {task.job.name} failed: {message['failed']}", flush=True)
        return message.get("row")

    def stop(self) -> None:
        self.state = "gone"
        self.process.kill()
        self.process.wait()


def wait_for_start(workers: Sequence[Worker], until: float) -> None:
    """Until all are ready or gone: an engine that starts beside a job would slow it down."""
    began = time.monotonic()
    for worker in workers:
        while worker.state == "starting" and time.time() < until:
            if worker.hear(min(1.0, until - time.time())) is not None:
                seconds = time.monotonic() - began
                print(f"{worker.name}: {worker.state} after {seconds:.0f} s", flush=True)


def run_lane(
    workers: Mapping[Engine, Worker],
    tasks: Sequence[Task],
    end: float,
    rows: Callable[[], list[Row]],
    keep: Callable[[Row], None],
) -> None:
    """Tasks in their order; no one is begun that should not end in time. All workers end."""
    try:
        wait_for_start(list(workers.values()), min(end, time.time() + START_SECONDS))
        left = list(tasks)
        while left and time.time() < end:
            for worker in workers.values():
                if worker.state == "starting":
                    worker.hear(0.0)
            left = [task for task in left if workers[task.engine].state != "gone"]
            task = next((task for task in left if workers[task.engine].state == "ready"), None)
            if task is None:
                time.sleep(0.5)
                continue
            left.remove(task)
            worker, wall = workers[task.engine], expected_wall(task, rows())
            if time.time() + wall > end:
                print(f"{worker.name}: no time for {task.job.name}, {task.repeat}", flush=True)
                continue
            row = worker.ask(task, min(end, time.time() + JOB_SECONDS + 3 * wall))
            if row is not None:
                keep(row)
    finally:
        for worker in workers.values():
            worker.stop()


def expected_wall(task: Task, rows: Sequence[Row]) -> float:
    """Seconds: those of the job's last row, of this variant if there is one, 0 if none is."""
    layers = task.engine.group.layers
    same = [row for row in rows if (row["job"], row["layers"]) == (task.job.name, layers)]
    own = [row for row in same if row["variant"] == task.engine.variant]
    return float((own or same or [{"wall": 0.0}])[-1]["wall"])
