"""The loop's Engine over the ranks of one domain."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from phalanx.checkpoint import Checkpoint, Shard, WrittenPieces, make_folder
from phalanx.data import IGNORE, Batch
from phalanx.engine import StepInputs, StepResult
from phalanx.errors import CheckpointError, ConfigError
from phalanx.models import ModelSource, StageModule, StageSpec, build_stage
from phalanx.parallel import Controller, fallback_key
from phalanx.parallel.control.rank_trainer import RankRecipe
from phalanx.train.batches.preferences import PreferenceMeasure
from phalanx.train.batches.scores import StageJudge, Validation
from phalanx.train.batches.validation import perplexity_of

_WEIGHT = "weight/"


@dataclass(frozen=True)
class GatheredStages:
    """The stages of a domain's model in this process alone, from weights that it has gathered.

    Attributes:
        judge: Measures the model on held-out pairs; None of a run that is measured on text.
    """

    source: ModelSource
    recipe: RankRecipe
    judge: PreferenceMeasure | None = None


def gathered_stages(source: ModelSource, recipe: RankRecipe, weights: Mapping[str, Tensor]) -> Iterator[StageModule]:
    """Yield the layers of a model one by one, with such weights, by name, in the place of its files'."""
    layers = source.num_layers
    for layer in range(layers):
        stage = build_stage(
            source,
            StageSpec(layer, layers, layer, layer + 1),
            adapter=recipe.adapter,
            activation_checkpointing=False,
            attention="eager" if recipe.attention == "eager" else "sdpa",
            seed=recipe.seed,
        )
        for name, parameter in stage.all_parameters().items():
            # a tied head is gathered once, as the embedding
            stands_for = name if name in weights else stage.family.embedding_weight
            if name in weights or (name == stage.family.head_weight and stands_for in weights):
                parameter.detach().copy_(weights[stands_for])
        yield stage


class DomainEngine:
    """The loop's engine over the ranks of a domain.

    Args:
        dp: Number of ranks with different rows.

    Attributes:
        num_steps: Steps that were applied, those before this session included.
        microbatch_losses: Losses of the microbatches of the last step, where several objectives learn at once.
    """

    def __init__(
        self,
        lead: Controller,
        dp: int,
        gathered: GatheredStages | None = None,
    ) -> None:
        self._lead = lead
        self._dp = dp
        self._gathered = gathered
        self.num_steps = 0
        self.microbatch_losses: Sequence[float] = ()

    def train_turn(self, step: int, inputs: StepInputs) -> StepResult:
        """Run one optimizer step on all ranks.

        Raises:
            FailedBatchError: Loss or gradient is not finite, or a spike by the inputs' limits; nothing was updated.
        """
        names = inputs.extras[0] if inputs.extras else ()
        extras = {name: torch.cat([row[name] for row in inputs.extras]) for name in names}
        outcome = self._lead.run_step(step, torch.cat(inputs.ids), torch.cat(inputs.labels), extras, inputs.limits)
        self.num_steps, self.microbatch_losses = step + 1, outcome.microbatch_losses
        return StepResult(
            step=step,
            loss=outcome.loss,
            num_targets=inputs.num_targets,
            gradient_norm=outcome.gradient_norm,
            phases=self._lead.timer.take_wall(),
            bytes_by_link={},
            batch=inputs.batch_digest(),
            guard=None,
        )

    def settle_steps(self) -> None:
        """Nothing of a finished step is under way."""

    def measure_sets(self, sets: Sequence[Iterable[Batch]]) -> Sequence[Validation]:
        """Perplexity on the held-out batches of each set, infinity when it overflows; or the scores of pairs."""
        if self._gathered is not None and self._gathered.judge is not None:
            return self.judge_stages(self._gathered.judge, sets)
        return [self._measure_perplexity(batches) for batches in sets]

    def judge_stages(self, judge: StageJudge, sets: Sequence[Iterable[Batch]]) -> Sequence[Validation]:
        """Measure the model on each set by a measure of stages, which are gathered in this process."""
        if self._gathered is None:
            raise ConfigError("parallel: this engine gathers no stages, so it measures no pairs")
        return judge(gathered_stages(self._gathered.source, self._gathered.recipe, dict(self.named_parameters())), sets)

    def measure_rows(self, rows: Sequence[Batch]) -> list[float]:
        """Sum of nats of each row, on the ranks."""
        return [self._sum_loss(row.input_ids, row.labels) for row in rows]

    def _sum_loss(self, ids: Tensor, labels: Tensor) -> float:
        """Return the nats of one row ``[1, seq]``; further copies get rows of which nothing is predicted."""
        padded = (
            functional.pad(ids, (0, 0, 0, self._dp - 1)),
            functional.pad(labels, (0, 0, 0, self._dp - 1), value=IGNORE),
        )
        return self._lead.evaluate_on_ranks(*padded)[0]

    def _measure_perplexity(self, batches: Iterable[Batch]) -> float:
        return perplexity_of(*self._lead.sum_losses(batches, self._dp))

    def state_shards(self) -> Iterator[Shard]:
        """The whole state, one stage at a time."""
        for stage in range(self._lead.num_stages):
            yield Shard(stage, self._lead.collect_from_ranks(stage), self.num_steps)

    def duplicate_shards(self) -> Iterator[Shard]:
        """The whole state as it is now, one stage at a time, for a thread that goes through it while steps go on."""
        steps, copied = self.num_steps, self._lead.duplicate_state()
        return (Shard(stage, tensors, steps) for stage, tensors in copied)

    def write_pieces(self, directory: Path) -> Callable[[], WrittenPieces]:
        """Have each rank write its part of the state as it is now; the function waits until all have."""
        try:
            folder = make_folder(directory)
        except OSError as exc:
            raise CheckpointError(f"{directory}: cannot be written to ({exc.strerror or exc})") from exc
        gather = self._lead.write_pieces(folder, self.num_steps)

        def collect() -> WrittenPieces:
            try:
                return gather()
            except CheckpointError:
                shutil.rmtree(folder, ignore_errors=True)
                raise

        return collect

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters by name, a tied head left out."""
        for shard in self.state_shards():
            for name, tensor in shard.tensors.items():
                if name.startswith(_WEIGHT):
                    yield name.removeprefix(_WEIGHT), tensor

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint, whatever layout it was saved under."""
        self.num_steps = checkpoint.num_steps(checkpoint.stages[0])
        names = checkpoint.stages_by_tensor()

        def read(key: str) -> Tensor:
            name = fallback_key(key, names)
            if name is None:
                return torch.zeros_like(checkpoint.read_tensor(f"{_WEIGHT}{key.partition('/')[2]}"))
            return checkpoint.read_tensor(name)

        self._lead.load_stages(self.num_steps, read)
