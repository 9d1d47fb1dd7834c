"""``phalanx bench chaos``: workers die again and again; measure lost work, recovery time and useful work."""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.checkpoint import CheckpointConfig
from phalanx.lab.bench.chaos.goodput import (
    ARMS,
    Arm,
    Window,
    checkpoint_cost,
    checkpoint_interval,
    goodput_block,
    play_window,
)
from phalanx.lab.bench.chaos.kill_plan import plan_kills
from phalanx.lab.bench.chaos.kills import kills_block, run_kills, run_undisturbed
from phalanx.lab.bench.chaos.run_process import RunProcess, train_command
from phalanx.lab.bench.measure.harness import cache_directory, print_progress, scratch_directory
from phalanx.lab.bench.measure.machine import bench_head, code_version, load_average
from phalanx.lab.bench.measure.row_file import Row, RowFile
from phalanx.lab.bench.measure.workloads import prepare_run, scratch_run
from phalanx.train import PipelineRun

PROTOCOL = 2
"""To be raised when a figure comes to mean something else; the code's version is in every key as well."""

_SEQUENCES = 16
_CALIBRATION_EVERY = 8
_CALIBRATION_STEPS = 25
_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class ChaosCell:
    """One run, or one arm in one window; `parameters` tell which."""

    what: str
    parameters: dict[str, Any]


@dataclass(frozen=True)
class ChaosWorkload:
    """A workload of the chaos bench.

    Attributes:
        run: The run; kills, checkpoints and guard are put in.
        gap: Steps between two of them, on average.
        means_s: Mean times between failures that the block `goodput` has an entry for.
    """

    run: PipelineRun
    runs: int
    kills: int
    gap: int
    windows: tuple[Window, ...]
    means_s: tuple[float, ...] = (15.0, 30.0, 60.0, 300.0)

    @property
    def num_steps(self) -> int:
        """Of each run with kills: the last replacement has joined by then, and a last checkpoint is under way."""
        return (self.kills + 2) * self.gap + 2


def bench_chaos(quick: bool, only_finished: bool = False) -> dict[str, Any]:
    """Kill workers and measure; progress goes to standard error.

    Args:
        quick: One run with a kill at each point, and goodput at 15 s only.
        only_finished: Run nothing; show what earlier calls with the same code have finished.
    """
    cache = cache_directory()
    finished = open_chaos_rows(cache / "bench" / "chaos.jsonl", code_version())
    return measure_chaos(small_workload(quick), finished, cache, quick=quick, only_finished=only_finished)


def small_workload(quick: bool) -> ChaosWorkload:
    """The small model with half of its usual batch: what dies in a step is done again, so a step should not be long."""
    usual = scratch_run()
    train = usual.train.model_copy(update={"batch_size": _SEQUENCES})
    # validation has no part in what is timed
    data = usual.data.model_copy(update={"max_validation_sequences": _SEQUENCES})
    run = usual.model_copy(update={"train": train, "data": data})
    if quick:
        return ChaosWorkload(run, runs=1, kills=5, gap=4, windows=(Window(15.0, 6, 15.0, 20.0),))
    schedule = ((15.0, 10), (30.0, 6), (60.0, 4), (300.0, 1))
    windows = tuple(Window(mean_s, failures, 20.0, 40.0) for mean_s, failures in schedule)
    return ChaosWorkload(run, runs=10, kills=10, gap=5, windows=windows)


def open_chaos_rows(path: Path, code: str) -> RowFile[ChaosCell]:
    """What was run by this very code."""
    return RowFile(path, lambda cell: [PROTOCOL, code, cell.what, cell.parameters])


def measure_chaos(
    what: ChaosWorkload, finished: RowFile[ChaosCell], cache: Path, *, quick: bool, only_finished: bool = False
) -> dict[str, Any]:
    """Run those parts of a workload that are not finished; see `bench_chaos`."""
    load, code, started = load_average(), code_version(), time.monotonic()
    with scratch_directory() as directory:
        field = _ChaosBench(what, finished, directory, cache, only_finished=only_finished)
        runs, plays = field.run_all_kills(), field.measure_goodput()
    return {
        **bench_head("chaos", load, quick=quick, commit=code),
        "wall_s": time.monotonic() - started,
        "missing": what.runs + len(ARMS) * len(what.windows) - len(runs) - len(plays),
        "sequences_per_step": what.run.train.batch_size,
        "kills": kills_block(runs),
        "goodput": goodput_block(plays, what.means_s, "phalanx"),
        "goodput_checkpoint_restart": goodput_block(plays, what.means_s, "torchrun"),
        "checkpoint": None if field.calibration is None else _without_key(field.calibration),
        "rows": [*_kill_rows(runs), *({"what": "goodput", **_without_key(row)} for row in plays)],
    }


class _ChaosBench:
    """A runner of the missing runs, one at a time."""

    def __init__(
        self,
        what: ChaosWorkload,
        finished: RowFile[ChaosCell],
        directory: Path,
        cache: Path,
        *,
        only_finished: bool,
    ) -> None:
        self._what = what
        self._finished = finished
        self._directory = directory
        self._cache = cache
        self._may_run = not only_finished
        self._is_prepared = False
        self.calibration: Row | None = None
        """What a checkpoint costs; None until it was measured."""

    def run_all_kills(self) -> list[Row]:
        clean = self._undisturbed_row() if self._what.runs else None
        if clean is None:
            return []
        rows = [self._killed_row(clean, seed) for seed in range(self._what.runs)]
        return [row for row in rows if row is not None]

    def measure_goodput(self) -> list[Row]:
        """Every arm in every window; which arm is first changes from window to window."""
        calibration = self.calibration = self._calibration_row() if self._what.windows else None
        if calibration is None:
            return []
        rows = list[Row | None]()
        for number, window in enumerate(self._what.windows):
            every = checkpoint_interval(calibration["checkpoint_s"], window.mean_s, calibration["step_s"])
            rows += [self._goodput_row(arm, window, every) for arm in (ARMS if number % 2 == 0 else ARMS[::-1])]
        return [row for row in rows if row is not None]

    def _undisturbed_row(self) -> Row | None:
        run = self._with_kills(0)
        cell = ChaosCell("undisturbed", {"run": run.model_dump(mode="json")})
        return self._find_or_make(cell, lambda home: run_undisturbed(run, home, self._cache))

    def _killed_row(self, clean: Row, seed: int) -> Row | None:
        what, run = self._what, self._with_kills(seed)
        workers, microbatches = len(what.run.pipeline.worker_names), run.train.microbatches
        plan = plan_kills(seed, what.kills, workers=workers, microbatches=microbatches, gap=what.gap)
        parameters = {"run": run.model_dump(mode="json"), "plan": plan.model_dump(mode="json"), "seed": seed}
        return self._find_or_make(
            ChaosCell("kills", parameters),
            lambda home: {"seed": seed, **run_kills(run, plan, clean, home, self._cache)},
        )

    def _with_kills(self, seed: int) -> PipelineRun:
        """A run long enough for its kills, that saves often; every second one while the training goes on."""
        what = self._what
        train = what.run.train.model_copy(update={"steps": what.num_steps})
        return what.run.model_copy(
            update={
                "train": train,
                "pipeline": what.run.pipeline.model_copy(update={"respawns": what.kills}),
                "checkpoint": CheckpointConfig(every=2, keep=1, asynchronous=seed % 2 == 1),
            }
        )

    def _calibration_row(self) -> Row | None:
        every = _CALIBRATION_EVERY
        train = self._what.run.train.model_copy(update={"steps": _CALIBRATION_STEPS})
        checkpoint = CheckpointConfig(every=every, keep=1, asynchronous=True)
        run = self._what.run.model_copy(update={"train": train, "checkpoint": checkpoint})
        cell = ChaosCell("calibration", {"run": run.model_dump(mode="json")})

        def make(home: Path) -> Row:
            with RunProcess(train_command(run, home / "run"), home / "run", self._cache) as owner:
                owner.await_success(_TIMEOUT_S)
                lines = owner.read_steps()
            checkpoint_s, step_s = checkpoint_cost(lines, every)
            return {"checkpoint_s": checkpoint_s, "step_s": step_s}

        return self._find_or_make(cell, make)

    def _goodput_row(self, arm: Arm, window: Window, every: int) -> Row | None:
        checkpoint = CheckpointConfig(every=every, keep=2, asynchronous=True)
        train = self._what.run.train.model_copy(update={"steps": 1_000_000})
        run = self._what.run.model_copy(update={"train": train, "checkpoint": checkpoint})
        parameters = {"arm": arm, "window": asdict(window), "run": run.model_dump(mode="json")}
        return self._find_or_make(
            ChaosCell("goodput", parameters), lambda home: play_window(run, arm, window, home, self._cache)
        )

    def _find_or_make(self, cell: ChaosCell, make: Callable[[Path], Row]) -> Row | None:
        finished_row = self._finished.find_row(cell)
        if finished_row is not None or not self._may_run:
            return finished_row
        # text and model once, so that no run under test does it
        if not self._is_prepared:
            prepare_run(self._what.run, self._cache)
        self._is_prepared = True
        started = time.monotonic()
        with tempfile.TemporaryDirectory(dir=self._directory) as home:
            row = self._finished.append_row(cell, {"what": cell.what, **make(Path(home))})
        print_progress(f"chaos: {_in_words(row)}, {time.monotonic() - started:.0f} s")
        return row


def _kill_rows(runs: Sequence[Row]) -> list[Row]:
    """Return a flat row per death, with the result of its run."""
    of_run = (
        "seed",
        "bit_identical",
        "samples_lost",
        "samples_doubled",
        "false_accusations",
        "asynchronous_checkpoints",
    )
    return [{"what": "kill", **{key: run[key] for key in of_run}, **kill} for run in runs for kill in run["kills"]]


def _without_key(row: Row) -> Row:
    return {key: value for key, value in row.items() if key not in ("key", "what")}


def _in_words(row: Row) -> str:
    if row["what"] == "kills":
        outcome = "the same bits" if row["bit_identical"] else "OTHER BITS"
        return f"run {row['seed']}: {row['count']} of {row['planned']} killed, {outcome}"
    if row["what"] == "goodput":
        share = "not measured" if row["share"] is None else f"{100 * row['share']:.0f} %"
        return f"{row['arm']}: {row['failures']} failures in {row['window_s']:.0f} s, {share} useful"
    return str(row["what"])
