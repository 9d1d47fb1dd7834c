"""``phalanx bench checkpoint``: the cost of a checkpoint for the training, written at once or beside it, in one run."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.checkpoint import CheckpointConfig, list_checkpoints
from phalanx.data import BatchLoader
from phalanx.errors import TrainingError
from phalanx.lab.bench.measure.harness import cache_directory, open_engine, print_progress, rotate, scratch_directory
from phalanx.lab.bench.measure.machine import bench_head, load_average
from phalanx.lab.bench.measure.workloads import prepare_run, scratch_run
from phalanx.pipeline import PipelineEngine, settle_numerics
from phalanx.train import PipelineRun, step_inputs
from phalanx.train.records.history import RunHistory
from phalanx.train.records.record import RunningTotals
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.records.summary import Figures
from phalanx.train.saving.savepoint import ModelOrigin, RunProgress, Savepoint
from phalanx.train.saving.saver import Saver

_ARMS = ("none", "synchronous", "asynchronous")


@dataclass(frozen=True)
class CheckpointWorkload:
    """A model and a run on which checkpoints are measured.

    Attributes:
        run: The run; `checkpoint.every` steps are one block.
    """

    model: str
    run: PipelineRun
    rounds: int


@dataclass
class _Arm:
    block_s: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    write_s: list[float] = field(default_factory=list)


def bench_checkpoint(quick: bool) -> dict[str, Any]:
    """Measure; progress goes to standard error."""
    every, rounds = (5, 3) if quick else (10, 8)
    run = scratch_run().model_copy(update={"checkpoint": CheckpointConfig(every=every, keep=1)})
    return measure_checkpoint(CheckpointWorkload("scratch-10m", run, rounds), quick=quick)


def measure_checkpoint(workload: CheckpointWorkload, *, quick: bool) -> dict[str, Any]:
    """Measure one workload; see `bench_checkpoint`."""
    load = load_average()
    with scratch_directory() as directory, _open_session(workload, directory) as session:
        arms = {arm: _Arm() for arm in _ARMS}
        for turn in range(1 + workload.rounds):
            for arm in rotate(_ARMS, turn):
                session.run_block(arm, arms[arm] if turn else _Arm())
            print_progress(f"{workload.model}: turn {turn + 1} of {1 + workload.rounds}")
        size_bytes = session.size_bytes()
    return {
        **bench_head("checkpoint", load, quick=quick),
        "rows": [_checkpoint_row(workload, arm, arms, size_bytes) for arm in _ARMS],
    }


class _CheckpointSession:
    """A run that all arms train in turns."""

    def __init__(
        self, run: PipelineRun, home: RunDirectory, engine: PipelineEngine, loader: BatchLoader, saver: Saver
    ) -> None:
        self._run = run
        self._home = home
        self._engine = engine
        self._loader = loader
        self.saver = saver
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._num_steps = 0

    def run_block(self, arm: str, result: _Arm) -> None:
        """Save once, then train `checkpoint.every` steps and wait for background writes."""
        self.events.clear()
        started = time.perf_counter()
        stall = self._time_action(lambda: self._save_by_arm(arm))
        for _ in range(self._run.checkpoint.every):
            self._engine.train_turn(
                self._num_steps, step_inputs(self._loader.next_batch(), self._run.train.microbatches)
            )
            self._num_steps += 1
            stall += self._time_action(self.saver.advance_pending)
        # an interval ends where the next checkpoint would have to wait
        stall += self._time_action(self.saver.finish_pending)
        result.block_s.append(time.perf_counter() - started)
        result.stall_s.append(stall)
        if arm == "none":
            return
        written = [body["write_s"] for kind, body in self.events if kind == "checkpoint_saved"]
        if len(written) != 1:
            raise TrainingError(f"bench: {arm}: expected one checkpoint, found {self.events!r:.300}")
        result.write_s += written

    def size_bytes(self) -> int:
        newest = max(list_checkpoints(self._home.checkpoint_directory).items())[1]
        return sum(path.stat().st_size for path in newest.iterdir())

    def _save_by_arm(self, arm: str) -> None:
        if arm == "synchronous":
            self.saver.save_now(self._num_steps)
        elif arm == "asynchronous":
            self.saver.begin_save(self._num_steps)

    @staticmethod
    def _time_action(action: Callable[[], object]) -> float:
        started = time.perf_counter()
        action()
        return time.perf_counter() - started


@contextlib.contextmanager
def _open_session(workload: CheckpointWorkload, directory: Path) -> Iterator[_CheckpointSession]:
    run = workload.run
    settle_numerics(run.train.threads)
    source, corpus = prepare_run(run, cache_directory())
    loader = BatchLoader(corpus, run.train.batch_size, run.train.seed)
    progress, events = RunProgress(loader, Figures(), RunningTotals()), list[tuple[str, dict[str, Any]]]()
    with open_engine(run, source, directory / "run") as (engine, home), contextlib.ExitStack() as stack:
        savepoint = Savepoint(run, home, progress, ModelOrigin(source), RunHistory())
        saver = Saver(engine, savepoint, lambda kind, body: events.append((kind, body)))
        stack.callback(saver.close)
        session = _CheckpointSession(run, home, engine, loader, saver)
        session.events = events
        yield session


def _checkpoint_row(workload: CheckpointWorkload, arm: str, arms: dict[str, _Arm], size_bytes: int) -> dict[str, Any]:
    every, mine, bare = workload.run.checkpoint.every, arms[arm], arms["none"]
    shares = [block / plain - 1.0 for block, plain in zip(mine.block_s, bare.block_s, strict=True)]
    saves = arm != "none"
    return {
        "model": workload.model,
        "arm": arm,
        "stages": workload.run.pipeline.stages,
        "every": every,
        "rounds": len(mine.block_s),
        "checkpoint_bytes": size_bytes if saves else None,
        "step_s": statistics.median(mine.block_s) / every,
        "extra_step_time": statistics.median(shares) if saves else None,
        "extra_step_time_worst": max(shares) if saves else None,
        "stall_s": statistics.median(mine.stall_s) if saves else None,
        "stall_share": statistics.median(mine.stall_s) / statistics.median(bare.block_s) if saves else None,
        "write_s": statistics.median(mine.write_s) if saves else None,
    }
