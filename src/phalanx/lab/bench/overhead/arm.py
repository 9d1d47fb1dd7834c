"""One arm of a bench in a process of its own: set up, wait for orders, run so many steps, say what happened."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from pydantic import Field, ValidationError

from phalanx.child import die_with_parent
from phalanx.config import StrictModel
from phalanx.data import BatchLoader, prepare
from phalanx.engine import UNGUARDED, StepInputs
from phalanx.errors import ConfigError
from phalanx.lab.bench.measure.plain import PlainTrainer
from phalanx.lab.bench.overhead.loss import Loss
from phalanx.models import ModelSource, open_model
from phalanx.pipeline import PipelineEngine, keep_freed_memory, settle_numerics
from phalanx.train import PipelineRun, step_inputs
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.sessions.cluster import company
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.stage_source import StageLibrary


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


class _Runner(Protocol):
    def __call__(self, step: int, inputs: StepInputs, lose: str | None = None) -> Report: ...


def main(spec_path: Path, orders: IO[str], answers: IO[str]) -> None:
    """Serve orders until there are no more.

    Raises:
        ConfigError: The file or an order is malformed.
        PhalanxError: As training does.
    """
    die_with_parent()
    spec = _parse(ArmSpec, spec_path.read_text(encoding="utf-8"))
    run = spec.run
    torch.set_num_threads(run.train.threads)
    source = open_model(run.model, Path(spec.cache) / "models", run.train.seed)
    corpus = prepare(run.data, Path(spec.cache) / "data", run.train.seed, source.tokenizer_path, lambda *_: None)
    loader = BatchLoader(corpus, run.train.batch_size, run.train.seed)
    with _plain(run, source) if spec.plain else _pipeline(spec, source) as runner:
        _say(answers, Report())
        done = 0
        for request_line in orders:
            order = _parse(StepsRequest, request_line)
            torch.set_num_threads(order.threads)
            total = Report()
            for step in range(done, done + order.steps):
                inputs = step_inputs(loader.next(), run.train.microbatches)
                total = _add(total, runner(step, inputs, order.lose if step == done else None))
            done += order.steps
            _say(answers, total)


@contextlib.contextmanager
def _plain(run: PipelineRun, source: ModelSource) -> Iterator[_Runner]:
    # the pipeline has it too: what is compared is the pipeline, not the allocator
    keep_freed_memory()
    trainer = PlainTrainer(source, run.optimizer, run.train.steps)
    yield lambda step, inputs, lose=None: Report(losses=(trainer.step(step, inputs),))


@contextlib.contextmanager
def _pipeline(spec: ArmSpec, source: ModelSource) -> Iterator[_Runner]:
    run = spec.run
    settle_numerics(run.train.threads)
    home = RunDirectory(Path(spec.directory), run, resume=False)
    plan = make_plan(run, source)
    library = StageLibrary(source, plan, None)
    with company(run, home, plan, library, lambda kind, body: None) as engine:
        engine.start(0, library.digests() if run.guard.enabled else {}, timeout_s=run.pipeline.step_timeout_s)
        loss = Loss(engine, home, source, plan)
        yield lambda step, inputs, lose=None: _pipeline_step(engine, step, inputs, loss, lose)


def _pipeline_step(engine: PipelineEngine, step: int, inputs: StepInputs, loss: Loss, lose: str | None) -> Report:
    result, recovery_s = (engine.step(step, inputs), None) if lose is None else loss.step(lose, step, inputs)
    guard = result.guard or UNGUARDED
    return Report(
        recovery_s=recovery_s,
        steps_redone=guard.steps_redone,
        losses=(result.loss,),
        audits=guard.num_audits,
        alarms=guard.num_alarms,
        wall_by_phase=dict(result.phases),
        bytes_by_link=dict(result.bytes_by_link),
        usage={party: dict(seconds) for party, seconds in engine.usage.items()},
    )


def _add(left: Report, right: Report) -> Report:
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


def _parse(model: Any, text: str) -> Any:
    try:
        return model.model_validate_json(text)
    except ValidationError as exc:
        raise ConfigError(f"bench: a malformed {model.__name__}: {exc}") from exc


def _say(answers: IO[str], report: Report) -> None:
    answers.write(report.model_dump_json() + "\n")
    answers.flush()


if __name__ == "__main__":
    # what libraries print must not be taken for an answer
    with contextlib.redirect_stdout(sys.stderr):
        main(Path(sys.argv[1]), sys.stdin, sys.__stdout__ or sys.stdout)
