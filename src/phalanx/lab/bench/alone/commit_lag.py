"""A bench of `guard.commit_lag`: does 1 take the wait for audits out of a step? Both values run side by side.

``python -m phalanx.lab.bench.alone.commit_lag OUT.json [--minutes 10] [--audit-rate 0.125] [--stages 4]``

Each arm has an owner's engine and worker processes of its own; they take turns of a few steps, each turn ended by
waiting until its last step is verified, so that no arm works in another one's turn. `audit_wait_s` is the owner's time,
per step, in which every stage had committed and audits alone kept the step from being applied: the step's own audits
with a lag of 0, those of the step before (and whatever else is not done as long as they are not) with a lag of 1.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.engine import UNGUARDED
from phalanx.lab.bench.measure.machine import load_average, taken_on
from phalanx.lab.bench.measure.workloads import scratch_run
from phalanx.models import ModelSource, open_model
from phalanx.pipeline import GuardConfig, PipelineEngine, settle_numerics
from phalanx.testing import random_batch
from phalanx.train import PipelineRun, step_inputs
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.sessions.cluster import company
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.stage_source import StageLibrary

STEPS = 4
"""Steps of one turn."""


@dataclass
class LagArm:
    """One engine and its measurements per step, one figure a turn."""

    engine: PipelineEngine
    run: PipelineRun
    vocab_size: int
    wall_s: list[float] = field(default_factory=list)
    audit_wait_s: list[float] = field(default_factory=list)
    audits: int = 0
    waited_s: float = 0.0

    def turn(self, first: int) -> None:
        """Run some steps, and wait until the last one is verified."""
        self.waited_s, started = 0.0, time.perf_counter()
        for step in range(first, first + STEPS):
            batch = random_batch(self.run, self.vocab_size, step)
            result = self.engine.step(step, step_inputs(batch, self.run.train.microbatches))
            self.audits += (result.guard or UNGUARDED).num_audits
        self.engine.settle()
        self.wall_s.append((time.perf_counter() - started) / STEPS)
        self.audit_wait_s.append(self.waited_s / STEPS)

    def watch(self) -> None:
        """Add up the time in which nothing but audits keeps a step from being applied."""
        coordinator, last = self.engine._coordinator, [0.0]
        decided = coordinator.decided

        def noting(*, may_lag: bool) -> bool:
            now, decision = time.perf_counter(), decided(may_lag=may_lag)
            if last[0]:
                self.waited_s += now - last[0]
            last[0] = now if not decision and _lacks_audits_alone(self.engine) else 0.0
            return decision

        coordinator.decided = noting  # type: ignore[method-assign]


def _lacks_audits_alone(engine: PipelineEngine) -> bool:
    facts = engine._facts
    ledger = facts.ledger
    if len(ledger.commits) < len(facts.assignment.holders):
        return False
    agreed = set(facts.watched) <= ledger.gradients_agreed & facts.agreed.keys()
    return facts.lagging is not None or (ledger.audits_drawn and agreed)


@contextlib.contextmanager
def arm(run: PipelineRun, source: ModelSource, directory: Path) -> Iterator[LagArm]:
    """Start an engine and its workers."""
    home, plan = RunDirectory(directory, run, resume=False), make_plan(run, source)
    library = StageLibrary(source, plan, None)
    with company(run, home, plan, library, lambda kind, body: None) as engine:
        engine.start(0, library.digests(), timeout_s=run.pipeline.step_timeout_s)
        yield LagArm(engine, run, source.vocab_size)


def measure(rate: float, stages: int, minutes: float) -> dict[str, object]:
    """Let both arms take turns for `minutes`; the first turn of each is not counted."""
    settle_numerics(1)
    base, load = scratch_run(), load_average()
    pipeline = base.pipeline.model_copy(update={"stages": stages})
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-lag-")))
        source = open_model(base.model, directory / "models", base.train.seed)
        arms = {}
        for lag in (0, 1):
            guard = GuardConfig(audit_rate=rate, step_audit_rate=0.0, owner_audit_rate=0.0, commit_lag=lag)
            run = base.model_copy(update={"pipeline": pipeline, "guard": guard})
            arms[lag] = stack.enter_context(arm(run, source, directory / f"lag-{lag}"))
        for lag_arm in arms.values():
            lag_arm.turn(0)
            lag_arm.wall_s.clear()
            lag_arm.audit_wait_s.clear()
            lag_arm.watch()
        until, first = time.monotonic() + 60 * minutes, STEPS
        while time.monotonic() < until:
            # the arms swap their places, so that a machine that gets busier slows both
            for lag in (0, 1) if first // STEPS % 2 else (1, 0):
                arms[lag].turn(first)
            first += STEPS
            waits = {lag: (arm.wall_s[-1], arm.audit_wait_s[-1]) for lag, arm in arms.items()}
            sys.stderr.write(f"seconds a step, of it waiting for audits, by lag: {waits}\n")
    ratios = [lagging / waiting for waiting, lagging in zip(arms[0].wall_s, arms[1].wall_s, strict=True)]
    return {
        "name": "commit_lag",
        "command": f"python -m phalanx.lab.bench.alone.commit_lag OUT --audit-rate {rate} --stages {stages}"
        f" --minutes {minutes}",
        **taken_on([load, load_average()]),
        "wall_ratio_median": statistics.median(ratios),
        "wall_ratios": ratios,
        "rows": [_row(lag, arm) for lag, arm in arms.items()],
    }


def _row(lag: int, one: LagArm) -> dict[str, object]:
    waited, wall = sum(one.audit_wait_s), sum(one.wall_s)
    return {
        "commit_lag": lag,
        "turns": len(one.wall_s),
        "steps_per_turn": STEPS,
        "audits": one.audits,
        "step_s": one.wall_s,
        "step_s_median": statistics.median(one.wall_s),
        "audit_wait_s": one.audit_wait_s,
        "audit_wait_s_median": statistics.median(one.audit_wait_s),
        "audit_wait_share": waited / wall,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--audit-rate", type=float, default=0.125)
    parser.add_argument("--stages", type=int, default=4)
    given = parser.parse_args()
    found = measure(given.audit_rate, given.stages, given.minutes)
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
