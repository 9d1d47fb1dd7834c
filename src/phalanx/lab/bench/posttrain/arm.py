"""One arm of this package in a process of its own: one rank that trains alone, or a pipeline with or without guard."""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from safetensors.torch import load_file

from phalanx.config import StrictModel
from phalanx.data import Batch
from phalanx.lab.bench.measure.harness import open_engine, parse_message, send_message, serve_bench, serve_orders
from phalanx.lab.bench.posttrain.rows import rows_of_step
from phalanx.models import ModelConfig, ModelSource, open_model
from phalanx.objectives import objective_of
from phalanx.objectives.dpo import DpoSettings
from phalanx.objectives.pairs import REFERENCE
from phalanx.optimizers import OptimizerConfig
from phalanx.parallel import ParallelConfig, RankEnv, RankTrainer, join_ranks
from phalanx.parallel.control.rank_trainer import RankRecipe
from phalanx.parallel.groups.mesh import open_domain
from phalanx.parallel.groups.rendezvous import own_device
from phalanx.pipeline import keep_freed_memory, settle_numerics
from phalanx.train import PipelineRun, step_inputs

StepRunner = Callable[[int, Batch], float]
_ALONE = RankEnv(0, 1, 0, 1)


class PosttrainSpec(StrictModel):
    """The order of one arm; TRL's program reads the same file.

    Attributes:
        rows: File that `write_rows` wrote.
        lr: Learning rate, the same in every step.
        beta2: Decay of the second moment.
        stored_reference: The reference speaks once, before the training; TRL's usual way is to ask it in every step.
        run: Run of the pipeline; None where one process trains.
    """

    objective: str
    model: str
    rehearsal: str
    rows: str
    batch_size: int
    length: int
    lr: float = 1e-3
    beta2: float = 0.95
    stored_reference: bool = True
    run: PipelineRun | None = None
    directory: str

    @property
    def optimizer_config(self) -> OptimizerConfig:
        """Both sides' optimizer."""
        return OptimizerConfig(lr=self.lr, betas=(0.9, self.beta2), weight_decay=0.0, schedule="constant")

    @property
    def run_objective(self) -> str | DpoSettings:
        """The objective as run files have it."""
        return "causal_lm" if self.objective == "sft" else DpoSettings(beta=0.1)


class TurnRequest(StrictModel):
    """So many further steps."""

    steps: int


class TurnReport(StrictModel):
    """Their losses; the first line of a process has its version instead."""

    losses: tuple[float, ...] = ()
    version: str | None = None


def main(path: Path, orders: IO[str], answers: IO[str]) -> None:
    """Be a child of the bench."""
    settle_numerics(1)
    serve(parse_message(PosttrainSpec, path.read_text(encoding="utf-8")), orders, answers)


def serve(spec: PosttrainSpec, orders: Iterable[str], answers: IO[str]) -> None:
    """Serve orders until there are no more."""
    rows = load_file(spec.rows)
    with contextlib.ExitStack() as stack:
        if spec.run is None:
            place = RankEnv(0, 1, 0, 1, Path(spec.directory) / "rendezvous")
            stack.enter_context(join_ranks(place, own_device("cpu", place), "00"))
            # what libraries load when they are first used is there before memory is counted
            open_lone_rank(spec, ModelSource(Path(spec.rehearsal)))(0, _step_batch(spec, rows, 0))
            gc.collect()
        runner: StepRunner | None = None
        num_steps = 0

        def act(order: TurnRequest) -> TurnReport:
            nonlocal runner, num_steps
            if runner is None:
                if spec.run is None:
                    runner = open_lone_rank(spec, ModelSource(Path(spec.model)))
                else:
                    runner = stack.enter_context(open_guarded(spec, spec.run))
            steps = range(num_steps, num_steps + order.steps)
            num_steps += order.steps
            return TurnReport(losses=tuple(runner(step, _step_batch(spec, rows, step)) for step in steps))

        send_message(answers, TurnReport(version="phalanx"))
        serve_orders(TurnRequest, orders, answers, act)


def open_lone_rank(spec: PosttrainSpec, source: ModelSource) -> StepRunner:
    """Let one rank train, as a run with an empty section ``[parallel]`` does."""
    recipe = RankRecipe(
        parallel=ParallelConfig(),
        optimizer=spec.optimizer_config,
        batch_size=spec.batch_size,
        microbatches=1,
        sequence_length=spec.length,
        total_steps=10**6,
        objective=spec.run_objective,
    )
    trainer = RankTrainer(recipe, source, open_domain(recipe.parallel, own_device("cpu", _ALONE)))
    return lambda step, batch: trainer.train_step(step, batch.input_ids, batch.labels, batch.extras).loss


@contextlib.contextmanager
def open_guarded(spec: PosttrainSpec, run: PipelineRun) -> Iterator[StepRunner]:
    """Let a company of workers train, with the guard that its run has."""
    keep_freed_memory()
    source = open_model(ModelConfig(path=spec.model), Path(spec.directory), run.train.seed)
    objective = objective_of(spec.run_objective)
    with open_engine(run, source, Path(spec.directory) / "run") as (engine, _):
        yield lambda step, batch: engine.train_turn(step, step_inputs(batch, run.train.microbatches, objective)).loss


def _step_batch(spec: PosttrainSpec, rows: dict[str, Any], step: int) -> Batch:
    cut = rows_of_step(rows, step, spec.batch_size)
    extras = {REFERENCE: cut[REFERENCE]} if REFERENCE in cut else {}
    return Batch(cut["ids"], cut["labels"], tuple(range(step * spec.batch_size, (step + 1) * spec.batch_size)), extras)


if __name__ == "__main__":
    with serve_bench() as pipes:
        main(Path(sys.argv[1]), *pipes)
