"""A bench of two ways to replace a killed worker, side by side: forked from the fork server, and started from nothing.

``python -m phalanx.lab.bench.alone.respawn OUT.json [--rounds 4]``

Both arms train `scratch-10m` with K = 4 in real processes and take turns, 8 sequences a step. In each turn a worker is
killed before a step; `cpu_s` is the CPU time that its replacement has used when it is given a role, `joined_s` the
time since the owner ordered it (which includes the rest of the step that is under way).
"""

import argparse
import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.lab.bench.chaos.run_process import workers_below
from phalanx.lab.bench.measure.machine import current_commit, describe_machine, load_average
from phalanx.lab.bench.measure.process_clock import cpu_seconds
from phalanx.lab.bench.measure.workloads import scratch_run
from phalanx.models import ModelSource, open_model
from phalanx.pipeline import LocalWorkers, PipelineEngine, settle_numerics
from phalanx.testing import random_batch
from phalanx.train import RunConfig, step_inputs
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.sessions.cluster import engaged, gathered, session_draw, session_name
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.stage_source import StageLibrary

_PATIENCE_STEPS = 40
_VOCABULARY = 4096
_SEQUENCES = 8


class _WithoutNursery(LocalWorkers):
    def keep_nursery(self, threads: int) -> None:
        """Start every worker from nothing."""
        del threads


class RespawnArm:
    """One training run in which each turn kills a worker."""

    def __init__(self, engine: PipelineEngine, run: RunConfig, events: list[tuple[str, dict[str, Any]]]) -> None:
        self._engine, self._run, self._events = engine, run, events
        self._num_steps = 0
        self.seen: set[int] = set()
        self.rows: list[dict[str, float]] = []

    def step(self) -> None:
        """Train one step."""
        run = self._run
        batch = random_batch(run, _VOCABULARY, self._num_steps)
        self._engine.step(self._num_steps, step_inputs(batch, run.train.microbatches))
        self._num_steps += 1

    def joined(self, kind: str, body: dict[str, Any]) -> None:
        """Receive an event of the engine; when a replacement is given a role, its costs are read."""
        self._events.append((kind, {**body, "at": time.perf_counter()}))
        if kind == "party_joined" and "step" in body:
            (born,) = set(workers_below(os.getpid())) - self.seen
            ordered = [said["at"] for what, said in self._events if what == "respawned"][-1]
            self.rows.append({"cpu_s": cpu_seconds([born]), "joined_s": time.perf_counter() - ordered})

    def turn(self, mine: list[int]) -> None:
        """Kill one worker and train until its replacement has a role."""
        self.seen |= set(workers_below(os.getpid()))
        before = len(self.rows)
        os.kill(mine.pop(0), signal.SIGKILL)
        for _ in range(_PATIENCE_STEPS):
            self.step()
            if len(self.rows) > before:
                mine += set(workers_below(os.getpid())) - self.seen
                return
        raise SystemExit("no replacement has joined")


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    load = load_average()
    usual = scratch_run()
    pipeline = usual.pipeline.model_copy(update={"respawns": arguments.rounds})
    train = usual.train.model_copy(update={"batch_size": _SEQUENCES})
    run = usual.model_copy(update={"pipeline": pipeline, "train": train})
    settle_numerics(run.train.threads)
    with tempfile.TemporaryDirectory() as directory:
        source = open_model(run.model, Path(directory) / "models", run.train.seed)
        with contextlib.ExitStack() as stack:
            arms: dict[str, tuple[RespawnArm, list[int]]] = {}
            for name in ("nursery", "anew"):
                before = set(workers_below(os.getpid()))
                arm = stack.enter_context(_open(name, run, source, Path(directory)))
                arms[name] = arm, sorted(set(workers_below(os.getpid())) - before)
            for _ in range(arguments.rounds):
                for arm, mine in arms.values():
                    arm.turn(mine)
    figures = {
        "name": "respawn",
        "command": f"python -m phalanx.lab.bench.alone.respawn OUT --rounds {arguments.rounds}",
        "machine": describe_machine(),
        "commit": current_commit(),
        "load": load,
        "rows": [{"arm": name, **row} for name, (arm, _) in arms.items() for row in arm.rows],
    }
    arguments.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _open(name: str, run: RunConfig, source: ModelSource, directory: Path) -> Iterator[RespawnArm]:
    home, plan = RunDirectory(directory / name, run, resume=False), make_plan(run, source)
    library = StageLibrary(source, plan, None)
    told: list[RespawnArm] = []
    events: list[tuple[str, dict[str, Any]]] = []

    def observe(kind: str, body: dict[str, Any]) -> None:
        for arm in told:
            arm.joined(kind, body)

    pipeline = run.pipeline
    opened = LocalWorkers if name == "nursery" else _WithoutNursery
    with (
        gathered(
            run,
            home,
            plan,
            observe,
            session=session_name(home),
            names=pipeline.workers,
            late=pipeline.late_workers,
            open_workers=opened,
        ) as crowd,
        engaged(crowd, run, home, plan, library, observe, draw=session_draw(home, run)) as engine,
    ):
        engine.start(0, library.digests(), timeout_s=pipeline.step_timeout_s)
        told.append(RespawnArm(engine, run, events))
        for _ in range(2):
            told[0].step()
        yield told[0]


if __name__ == "__main__":
    main()
