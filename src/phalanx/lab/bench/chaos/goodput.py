"""A measurement of useful work while workers are killed: failover within the step, and restarts from checkpoints."""

import itertools
import math
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phalanx.lab.bench.chaos.kill_plan import failure_times
from phalanx.lab.bench.chaos.kills import Line, median_or_none
from phalanx.lab.bench.chaos.run_process import RunProcess, train_command, under_torchrun
from phalanx.lab.bench.measure.row_file import Row
from phalanx.pipeline import GuardConfig
from phalanx.train import PipelineRun

Arm = Literal["phalanx", "torchrun"]
ARMS: tuple[Arm, ...] = ("phalanx", "torchrun")
_START_TIMEOUT_S = 600.0
_POLL_S = 0.05
_RESTARTS_PER_FAILURE = 20


@dataclass(frozen=True)
class Window:
    """A plan of one observation: how long it lasts, and how often a worker is killed meanwhile.

    Attributes:
        warm_up_s: Time from the first step on that is not measured.
        undisturbed_s: Time that is measured before the first failure, and again after the last.
        group: Workers that are killed at each time.
        seed: Seed from which times and victims are drawn.
    """

    mean_s: float
    failures: int
    warm_up_s: float
    undisturbed_s: float
    seed: int = 1
    group: int = 1

    @property
    def kill_times(self) -> list[float]:
        """Times of the kills, seconds from the beginning of the disturbed part; the same for every arm."""
        return failure_times(self.seed, self.mean_s, self.failures)

    @property
    def length_s(self) -> float:
        """Length of the disturbed part in seconds."""
        return self.failures * self.mean_s


def checkpoint_interval(cost_s: float, mean_s: float, step_s: float) -> int:
    """Steps between checkpoints that lose least, for a mean time between failures.

    Args:
        cost_s: Time that a checkpoint adds to the training.

    Source: Young 1974; Daly 2006, first order: the square root of 2 * cost * mean time between failures.
    """
    return max(1, round(math.sqrt(2.0 * cost_s * mean_s) / step_s))


def checkpoint_cost(lines: Sequence[Line], every: int) -> tuple[float, float]:
    """What a checkpoint costs beside the training, and a step that none disturbs.

    A checkpoint that is begun after a step weighs on the steps that follow: the first half of an interval is compared
    with its second half. The first interval is a warm-up.

    Args:
        lines: Metrics of an undisturbed run.
        every: Steps between its checkpoints, even.

    Returns:
        Seconds of a checkpoint (at least a thousandth of a step) and of a step.
    """
    gaps = {later["step"]: later["time"] - row["time"] for row, later in itertools.pairwise(lines)}
    early = [gap for step, gap in gaps.items() if step >= every and step % every < every // 2]
    late = [gap for step, gap in gaps.items() if step >= every and step % every >= every // 2]
    step_s = sum(late) / len(late)
    return max((sum(early) / len(early) - step_s) * (every // 2), 1e-3 * step_s), step_s


def play_window(run: PipelineRun, arm: Arm, window: Window, directory: Path, cache: Path) -> Row:
    """Let one arm train while its workers are killed.

    Returns:
        Steps done, failures, and `share`: steps done times the undisturbed seconds of a step, by the seconds that
        passed; None where no two steps ended in an undisturbed part, before the first failure or after the last.
    """
    its, run_dir = make_arm_run(run, arm, window.failures), directory / "run"
    command = train_command(its, run_dir)
    if arm == "torchrun":
        command = under_torchrun(command, _RESTARTS_PER_FAILURE * window.failures)
    with RunProcess(command, run_dir, cache) as owner:
        _await_steps(owner, 1)
        time.sleep(window.warm_up_s)
        before_s = _calm_step_s(owner, window.undisturbed_s)
        first, started = _last_step(owner), time.monotonic()
        killed, missed = _kill_at(owner, window, started)
        wall_s = time.monotonic() - started
        steps = _last_step(owner) - first
        # what else the machine had to do may have changed: the reference is from both ends of the window
        _await_steps(owner, 2)
        after_s = _calm_step_s(owner, window.undisturbed_s)
        is_running = owner.is_running
    step_s = None if before_s is None or after_s is None else (before_s + after_s) / 2
    return {
        "arm": arm,
        "mean_time_between_failures_s": window.mean_s,
        "window_s": wall_s,
        "failures": killed,
        "failures_without_a_victim": missed,
        "steps": steps,
        "step_s_undisturbed": step_s,
        "step_s_before": before_s,
        "step_s_after": after_s,
        "share": None if step_s is None else steps * step_s / wall_s,
        "checkpoint_every": its.checkpoint.every,
        "survived": is_running,
    }


def make_arm_run(run: PipelineRun, arm: Arm, failures: int) -> PipelineRun:
    """Return the run of an arm: guarded and with replacements, or without a guard, so that a lost worker ends it."""
    respawns = 2 * failures + 8 if arm == "phalanx" else 0
    changes: dict[str, Any] = {"pipeline": run.pipeline.model_copy(update={"respawns": respawns})}
    if arm == "torchrun":
        changes["guard"] = GuardConfig(mode="off")
    return run.model_copy(update=changes)


def goodput_block(rows: Sequence[Row], means_s: Sequence[float], arm: Arm) -> dict[str, float | None]:
    """Return the share of useful work by mean time between failures; None without a measurement."""
    shares = {row["mean_time_between_failures_s"]: row["share"] for row in rows if row["arm"] == arm}
    return {f"{mean_s:g}": shares.get(mean_s) for mean_s in means_s}


def _await_steps(owner: RunProcess, count: int) -> None:
    """Wait until so many further steps are done."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    last, seen = _last_step(owner), 0
    while seen < count:
        if not owner.is_running:
            raise owner.make_failure("ended before its next step")
        if time.monotonic() > deadline:
            raise owner.make_failure(f"did no step within {_START_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_S)
        now = _last_step(owner)
        # a restart begins further back
        seen, last = seen + max(0, now - last), now


def _last_step(owner: RunProcess) -> int:
    lines = owner.read_steps()
    return lines[-1]["step"] if lines else -1


def _calm_step_s(owner: RunProcess, seconds: float) -> float | None:
    """Median seconds from one step's end to the next while no worker is killed; None where there was no step."""
    begun = time.time()
    time.sleep(seconds)
    lines = [row for row in owner.read_steps() if row["time"] >= begun]
    return median_or_none([later["time"] - row["time"] for row, later in itertools.pairwise(lines)])


def _kill_at(owner: RunProcess, window: Window, started: float) -> tuple[int, int]:
    """Kill random workers at each of the window's times, then wait for the window's end.

    Returns:
        Workers killed, and times at which there was none: the arm was between two starts.
    """
    draw = random.Random(window.seed)  # noqa: S311 - victims that can be drawn again, not a secret
    killed = missed = 0
    for moment in window.kill_times:
        time.sleep(max(0.0, started + moment - time.monotonic()))
        workers = owner.worker_pids()
        gone = [pid for pid in draw.sample(workers, min(window.group, len(workers))) if _kill_process(pid)]
        killed, missed = killed + len(gone), missed + (not gone)
    time.sleep(max(0.0, started + window.length_s - time.monotonic()))
    return killed, missed


def _kill_process(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
