"""One arm of a bench in a process of its own, and the bench's side: start it, let it step, measure it from outside."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from pydantic import Field

from phalanx.config import StrictModel
from phalanx.data import BatchLoader
from phalanx.engine import UNGUARDED, StepInputs
from phalanx.errors import TrainingError
from phalanx.lab.bench.measure.harness import (
    LineProcess,
    open_engine,
    parse_message,
    send_message,
    serve_bench,
    serve_orders,
)
from phalanx.lab.bench.measure.plain import PlainTrainer
from phalanx.lab.bench.measure.process_clock import cpu_seconds, process_tree, wait_until_quiet, worker_name
from phalanx.lab.bench.measure.workloads import prepare_run
from phalanx.models import ModelSource
from phalanx.pipeline import PipelineEngine, keep_freed_memory, settle_numerics
from phalanx.train import PipelineRun, step_inputs

_QUIET_TIMEOUT_S = 120.0


class ArmSpec(StrictModel):
    """The run of one arm, and where it keeps its files."""

    arm: str
    plain: bool
    run: PipelineRun
    directory: str
    cache: str


class StepsRequest(StrictModel):
    """Run `steps` further steps, with so many threads in this process; the worker `lose` is killed before the first."""

    steps: int
    threads: int
    lose: str | None = None


class Report(StrictModel):
    """An arm's report since the last order; `usage` holds totals since the start, CPU seconds by party and purpose."""

    losses: tuple[float, ...] = ()
    audits: int = 0
    alarms: int = 0
    wall_by_phase: dict[str, float] = Field(default_factory=dict)
    bytes_by_link: dict[str, int] = Field(default_factory=dict)
    usage: dict[str, dict[str, float]] = Field(default_factory=dict)
    recovery_s: float | None = None
    """From the loss of a worker to the end of the redone step; None when none was lost."""
    steps_redone: int = 0
    """Steps before the one that was interrupted, which a recovery went back over."""


@dataclass(frozen=True)
class Block:
    """A few steps of one arm, measured from their start until all its processes are idle again.

    Attributes:
        cpu_s: CPU seconds of all processes of the arm together.
    """

    steps: int
    wall_s: float
    cpu_s: float
    report: Report


class ArmProcess(LineProcess):
    """One arm's process with its workers; idle between blocks."""

    def __init__(self, spec: ArmSpec, environment: Mapping[str, str]) -> None:
        directory = Path(spec.directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
        path, log = directory.parent / f"{spec.arm}.json", directory.parent / f"{spec.arm}.log"
        path.write_text(spec.model_dump_json(), encoding="utf-8")
        super().__init__(f"arm {spec.arm!r}", (_MODULE, str(path)), environment, log)
        try:
            self.read_text()
        except TrainingError:
            self.close()
            raise
        self.pids = process_tree(self.process_id)

    def run_steps(self, steps: int, threads: int = 1) -> Block:
        """Run some steps and wait until everything that they started has ended."""
        cpu, started = cpu_seconds(self.pids), time.perf_counter()
        report = self.ask(StepsRequest(steps=steps, threads=threads), Report)
        ended = wait_until_quiet(self.pids, _QUIET_TIMEOUT_S)
        return Block(steps, ended - started, cpu_seconds(self.pids) - cpu, report)

    def lose_worker(self, worker: str) -> Report:
        """Kill one of the arm's workers, and run a step without it; nothing can be measured from outside afterwards.

        Returns:
            What happened, with the seconds from the loss to the end of the step.
        """
        return self.ask(StepsRequest(steps=1, threads=1, lose=worker), Report)


class _Runner(Protocol):
    def __call__(self, step: int, inputs: StepInputs, lose: str | None = None) -> Report: ...


def main(spec_path: Path, orders: IO[str], answers: IO[str]) -> None:
    """Serve orders until there are no more."""
    spec = parse_message(ArmSpec, spec_path.read_text(encoding="utf-8"))
    run, num_steps = spec.run, 0
    torch.set_num_threads(run.train.threads)
    source, corpus = prepare_run(run, Path(spec.cache))
    loader = BatchLoader(corpus, run.train.batch_size, run.train.seed)
    with _open_plain(run, source) if spec.plain else _open_pipeline(spec, source) as runner:

        def act(order: StepsRequest) -> Report:
            nonlocal num_steps
            torch.set_num_threads(order.threads)
            total = Report()
            for number in range(order.steps):
                inputs = step_inputs(loader.next_batch(), run.train.microbatches)
                total = _add_reports(total, runner(num_steps, inputs, None if number else order.lose))
                num_steps += 1
            return total

        send_message(answers, Report())
        serve_orders(StepsRequest, orders, answers, act)


@contextlib.contextmanager
def _open_plain(run: PipelineRun, source: ModelSource) -> Iterator[_Runner]:
    # the pipeline has it too: what is compared is the pipeline, not the allocator
    keep_freed_memory()
    trainer = PlainTrainer(source, run.optimizer, run.train.steps)
    yield lambda step, inputs, lose=None: Report(losses=(trainer.train_step(step, inputs),))


@contextlib.contextmanager
def _open_pipeline(spec: ArmSpec, source: ModelSource) -> Iterator[_Runner]:
    settle_numerics(spec.run.train.threads)
    with open_engine(spec.run, source, Path(spec.directory)) as (engine, _):
        yield lambda step, inputs, lose=None: _pipeline_step(engine, step, inputs, lose)


def _pipeline_step(engine: PipelineEngine, step: int, inputs: StepInputs, lose: str | None) -> Report:
    started = time.perf_counter()
    if lose is not None:
        _kill_worker(lose)
    result = engine.train_turn(step, inputs)
    guard = result.guard or UNGUARDED
    return Report(
        recovery_s=None if lose is None else time.perf_counter() - started,
        steps_redone=guard.steps_redone,
        losses=(result.loss,),
        audits=guard.num_audits,
        alarms=guard.num_alarms,
        wall_by_phase=dict(result.phases),
        bytes_by_link=dict(result.bytes_by_link),
        usage={party: dict(seconds) for party, seconds in engine.party_usage.items()},
    )


def _kill_worker(name: str) -> None:
    for pid in process_tree(os.getpid())[1:]:
        if worker_name(pid) == name:
            os.kill(pid, signal.SIGKILL)
            return
    raise TrainingError(f"bench: {name} does not run here; nothing can be lost")


def _add_reports(left: Report, right: Report) -> Report:
    def summed(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
        return {key: a.get(key, 0) + b.get(key, 0) for key in (*a, *(key for key in b if key not in a))}

    return Report(
        losses=(*left.losses, *right.losses),
        audits=left.audits + right.audits,
        alarms=left.alarms + right.alarms,
        wall_by_phase=summed(left.wall_by_phase, right.wall_by_phase),
        bytes_by_link=summed(left.bytes_by_link, right.bytes_by_link),
        usage=right.usage,
        recovery_s=left.recovery_s if right.recovery_s is None else right.recovery_s,
        steps_redone=left.steps_redone + right.steps_redone,
    )


_MODULE = "phalanx.lab.bench.overhead.arm"

if __name__ == "__main__":
    with serve_bench() as pipes:
        main(Path(sys.argv[1]), *pipes)
