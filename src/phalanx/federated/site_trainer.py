"""One process that trains a whole model: the owner measures with it, a site trains a round with it."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from phalanx.data import IGNORE, Batch, BatchLoader, without_attention
from phalanx.engine import NO_EXTRAS
from phalanx.errors import ConfigError, FailedBatchError, NonFiniteLossError
from phalanx.federated.algorithms import LocalRule, Named
from phalanx.federated.local import LocalUpdate, RoundWeights, SiteScores, SpentRows, personal_names
from phalanx.federated.vectors import shapes_of
from phalanx.models import (
    AttentionKind,
    ModelConfig,
    ModelSource,
    StageModule,
    StageSpec,
    add_embedding_noise,
    build_stage,
    with_marks,
)
from phalanx.models.master_weights import keep_masters
from phalanx.objectives import ObjectiveSettings, causal_lm_loss, kind_of, objective_of
from phalanx.optimizers import (
    OptimizerConfig,
    StageOptimizer,
    clip_coefficient,
    gradient_norm_squared,
    torch_optimizer,
)
from phalanx.split import task_of

_A = ".lora_A.weight"
StepGradient = tuple[Named, float, int]
"""The mean gradient of a step, its summed loss, and its targets; of a private one neither loss nor targets."""


class PrivateGradients(Protocol):
    """Makes gradients that tell little of any one row."""

    @property
    def spent_rows(self) -> SpentRows:
        """Spent part of the site's budget."""

    def round_gradients(self, number: int) -> Iterator[StepGradient]:
        """Yield the gradients of a round's steps, each of the weights as they are when it is asked for.

        Raises:
            PrivacyBudgetError: The budget does not pay for the round; nothing was drawn.
        """


@dataclass(frozen=True)
class Learning:
    """Objective and arithmetic of a whole model.

    Attributes:
        objective: Choice for `objective_of`.
        num_classes: Number of classes; 0 without a classification.
        attends: Kind of the attention mask.
        precision: Value of `train.precision`; trained weights and updates are in float32 with every value.
        neftune_alpha: Size of the noise on embeddings; None for none.
    """

    objective: str | ObjectiveSettings = "causal_lm"
    num_classes: int = 0
    attends: AttentionKind = "causal"
    precision: Literal["fp32", "bf16", "bf16_weights"] = "fp32"
    neftune_alpha: float | None = None


class WholeModel:
    """A whole model in one process, with its trained parameters.

    Args:
        frozen_a: Whether the factors A of LoRA keep the values that the seed gave.

    Attributes:
        trained: Trained and exchanged parameters, by canonical name.
        personal: Trained parameters that stay at their site.
    """

    def __init__(
        self, source: ModelSource, config: ModelConfig, seed: int, learning: Learning, *, frozen_a: bool
    ) -> None:
        self._learning, self._objective = learning, objective_of(learning.objective)
        # a task with a head of its own; all others are a loss of the model's output
        self._task = task_of(kind_of(learning.objective), learning.num_classes) if self._objective.own_head else None
        self._stage = build_stage(
            source,
            StageSpec(0, 1, 0, source.num_layers),
            adapter=config.adapter,
            activation_checkpointing=config.activation_checkpointing,
            attention=config.attention,
            seed=seed,
        )
        self._stage.attends = learning.attends
        if self._task is not None:
            self._task.put_head(self._stage)
        add_embedding_noise(self._stage, learning.neftune_alpha)
        if learning.precision == "bf16_weights":
            keep_masters(self._stage)
        parameters = self._stage.trainable_parameters()
        for name, parameter in parameters.items():
            parameter.requires_grad_(not (frozen_a and name.endswith(_A)))
        self.trained = {name: parameter for name, parameter in sorted(parameters.items()) if parameter.requires_grad}
        self._frozen = {name: parameter for name, parameter in parameters.items() if name not in self.trained}
        self.personal: dict[str, nn.Parameter] = {}
        self._stage.train()

    def make_personal(self, patterns: Sequence[str]) -> None:
        """Make weights personal: a site trains them and sends them to no other party; the owner leaves them alone."""
        names = personal_names(self.trained, patterns)
        self.personal = {name: parameter for name, parameter in self.trained.items() if name in names}
        self.trained = {name: parameter for name, parameter in self.trained.items() if name not in names}
        self._frozen |= self.personal

    def copy_weights(self) -> Named:
        """Return copies of the present trained parameters."""
        return {name: parameter.detach().clone() for name, parameter in self.trained.items()}

    def copy_frozen(self) -> Named:
        """Return parameters that are not exchanged and yet saved: frozen factors, and personal weights at first."""
        return {name: parameter.detach().clone() for name, parameter in self._frozen.items()}

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights, of exactly the exchanged parameters."""
        for name, parameter in self.trained.items():
            parameter.copy_(weights[name])

    @torch.no_grad()
    def load_personal(self, weights: Mapping[str, Tensor]) -> None:
        """Take a site's personal weights."""
        for name, parameter in self.personal.items():
            parameter.copy_(weights[name])

    @property
    def torch_module(self) -> StageModule:
        """The model; called with ids it gives logits."""
        return self._stage

    def begin_step(self, seed: int, step: int) -> None:
        """Give the noise on embeddings the number of the next step."""
        if self._stage.embedding_noise is not None:
            self._stage.embedding_noise.begin_step(seed, step)

    @property
    def learned_parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters, exchanged or personal."""
        return {**self.trained, **self.personal}

    def row_losses(self, ids: Tensor, labels: Tensor, extras: Mapping[str, Tensor] = NO_EXTRAS) -> Tensor:
        """Run some rows, and return the mean loss of each one over its own targets."""
        losses, read = [], without_attention(extras)
        # split, not slices: the backward pass of each slice would fill and add gradients of all rows
        for row, logits in enumerate(self._stage(with_marks(ids, extras)).split(1)):
            own = slice(row, row + 1)
            loss, targets = self._objective(logits, labels[own], {name: rows[own] for name, rows in read.items()})
            losses.append(loss / max(1, targets))
        return torch.stack(losses)

    def take_gradients(self) -> Named:
        """Hand out the gradients that there are, zeros where there are none, and leave none."""
        gradients = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in self.learned_parameters.items()
        }
        for parameter in self.learned_parameters.values():
            parameter.grad = None
        return gradients

    def compute_gradient(self, batch: Batch, num_microbatches: int) -> StepGradient:
        """Return the mean gradient over a batch's targets, the summed loss, and the targets."""
        total, targets = 0.0, 0
        # the sum over microbatches is divided by all targets
        self._stage.router_share = self._objective.count_targets(batch.labels) / num_microbatches
        for part in batch.split_microbatches(num_microbatches):
            loss, count = self._compute_loss(part)
            # torch has no annotation for it
            loss.backward()  # type: ignore[no-untyped-call]
            self._widen_gradients()
            total, targets = total + float(loss.detach()), targets + count
        gradients = self.take_gradients()
        if not targets or not math.isfinite(total):
            raise FailedBatchError(f"loss {total} over {targets} targets; lower optimizer.lr, or give another batch")
        for gradient in gradients.values():
            gradient.div_(targets)
        return gradients, total, targets

    @torch.no_grad()
    def measure_batches(self, batches: Iterable[Batch]) -> SiteScores:
        """Measure the model as it is on held-out rows."""
        loss, targets, predicted, true = 0.0, 0, list[int](), list[int]()
        self._stage.eval()
        for batch in batches:
            result, count, answers = self._measure_batch(batch)
            loss, targets, predicted = loss + result, targets + count, [*predicted, *answers]
            if self._learning.num_classes:
                true += [int(label) for label in batch.labels[batch.labels != IGNORE]]
        self._stage.train()
        counts = tuple(
            (
                true.count(number),
                predicted.count(number),
                sum(a == b == number for a, b in zip(true, predicted, strict=True)),
            )
            for number in range(self._learning.num_classes)
        )
        return SiteScores(loss, targets, counts)

    def _compute_loss(self, part: Batch) -> tuple[Tensor, int]:
        """Return the summed loss of a microbatch, and its targets."""
        ids, extras = with_marks(part.input_ids, part.extras), without_attention(part.extras)
        if self._task is not None:
            with self._autocast_context():
                return self._task.compute_loss(self._stage, ids, part.labels, extras)
        with self._autocast_context():
            output = self._stage(ids)
        return self._objective(output, part.labels, extras)

    def _autocast_context(self) -> AbstractContextManager[object]:
        is_cast = self._learning.precision == "bf16"
        return torch.autocast("cpu", dtype=torch.bfloat16) if is_cast else nullcontext()

    def _widen_gradients(self) -> None:
        """Add the gradients of narrow weights to those of their masters, in float32."""
        for name, parameter in self._stage.computing.items():
            master = self._stage.masters[name]
            if parameter.grad is not None and master.requires_grad:
                wide = parameter.grad.to(torch.float32)
                master.grad = wide if master.grad is None else master.grad + wide
            parameter.grad = None

    def _measure_batch(self, batch: Batch) -> tuple[float, int, Sequence[int]]:
        """Return the summed loss of held-out rows, the number of targets, and the predicted classes."""
        ids = with_marks(batch.input_ids, batch.extras)
        if self._task is not None:
            scores = self._task.measure_rows(self._stage, ids, batch.labels)
            return scores.loss, scores.targets, scores.answers
        output = self._stage(ids)
        # how far the next token is found, whatever rows are weighted by in training
        loss, targets = (
            self._objective(output, batch.labels, without_attention(batch.extras))
            if self._objective.target == "pair"
            else causal_lm_loss(output, batch.labels)
        )
        return float(loss), targets, ()


@dataclass(frozen=True)
class SiteData:
    """The training rows and held-out rows of a site.

    Attributes:
        pick: Gives its own sequences by number, from 0.
        digest: SHA-256 in hex of all that they are drawn from.
    """

    name: str
    loader: BatchLoader
    num_sequences: int
    held_out: Callable[[], Iterable[Batch]]
    pick: Callable[[Sequence[int]], Batch]
    digest: str

    def round_batches(self, number: int, steps: int, batch_size: int) -> Iterator[Batch]:
        """Yield the batches of a round, which follow from its number alone: a site may miss any others.

        Args:
            batch_size: Sequences of a batch, or pairs in a run on preferences.
        """
        self.loader.load_position({**self.loader.position_state(), "num_samples": (number - 1) * steps * batch_size})
        for _ in range(steps):
            yield self.loader.next_batch()


@dataclass(frozen=True)
class SiteSchedule:
    """The local schedule of a site in a round.

    Attributes:
        optimizer: Begun anew in every round.
        batch_size: Sequences of a step, or pairs in a run on preferences.
    """

    optimizer: OptimizerConfig
    steps: int
    batch_size: int
    microbatches: int
    seed: int


class SiteTrainer:
    """A `LocalTrainer` of a whole model in this process: it is loaded once, for all rounds.

    Args:
        private: Makes each step's gradient one with noise; None where the batches' own is taken.
    """

    def __init__(
        self,
        model: WholeModel,
        data: SiteData,
        schedule: SiteSchedule,
        directory: Path | None = None,
        private: PrivateGradients | None = None,
    ) -> None:
        self._model, self._data, self._schedule, self._private = model, data, schedule, private
        if model.personal and directory is None:
            raise ConfigError("federated.personal: the site has no directory for its personal weights")
        self._first = {name: parameter.detach().clone() for name, parameter in model.personal.items()}
        shapes = shapes_of(self._first)
        self._kept = RoundWeights(directory / "personal", shapes) if directory and model.personal else None

    def trained_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """As `LocalTrainer` says."""
        return shapes_of(self._model.trained)

    def train_round(self, number: int, start: Mapping[str, Tensor], rate: float, rule: LocalRule) -> LocalUpdate:
        """As `LocalTrainer` says."""
        model, schedule = self._model, self._schedule
        model.load_weights(start)
        if self._kept is not None:
            model.load_personal(self._kept.load_before(number) or self._first)
        update = _LocalOptimizer(model.learned_parameters, frozenset(start), schedule.optimizer)
        total, targets = 0.0, 0
        private = self._private
        for gradients, loss, count in self._plain_steps(number) if private is None else private.round_gradients(number):
            total, targets = total + loss, targets + count
            update.step(gradients, rate, rule)
        if self._kept is not None:
            self._kept.save_round(
                number, {name: parameter.detach().clone() for name, parameter in model.personal.items()}
            )
        delta = {name: parameter.detach() - start[name] for name, parameter in model.trained.items()}
        if private is not None:
            return LocalUpdate(delta, self._data.num_sequences, None, 0, schedule.steps, private.spent_rows)
        return LocalUpdate(delta, self._data.num_sequences, total / targets, targets, schedule.steps)

    def _plain_steps(self, number: int) -> Iterator[StepGradient]:
        schedule = self._schedule
        for step, batch in enumerate(self._data.round_batches(number, schedule.steps, schedule.batch_size)):
            torch.default_generator.manual_seed(self._dropout_seed(number, step))
            self._model.begin_step(schedule.seed, (number - 1) * schedule.steps + step)
            yield self._model.compute_gradient(batch, schedule.microbatches)

    def measure_weights(self, weights: Mapping[str, Tensor]) -> SiteScores:
        """As `LocalTrainer` says."""
        self._model.load_weights(weights)
        if self._kept is not None:
            self._model.load_personal(self._kept.load_latest() or self._first)
        return self._model.measure_batches(self._data.held_out())

    def _dropout_seed(self, number: int, step: int) -> int:
        text = f"phalanx federated {self._schedule.seed} {self._data.name} {number} {step}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


class _LocalOptimizer:
    """The optimizer of one round, with a state that ends with it; rules apply to shared parameters.

    AdamW has the bits of stages; any other line of the table is torch's class.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], shared: frozenset[str], config: OptimizerConfig) -> None:
        self._weights, self._shared, self._config = weights, shared, config
        self._adamw = StageOptimizer(weights, config) if config.kind in ("adamw", "adamw8bit") else None
        self._torch_optimizer = None if self._adamw is not None else _make_optimizer(weights, config)

    def step(self, gradients: Named, rate: float, rule: LocalRule) -> None:
        """Clip, correct, and move; the addition of a rule is not clipped."""
        try:
            clipped = clip_coefficient(math.sqrt(gradient_norm_squared(gradients)), self._config.clip_norm)
        except NonFiniteLossError as exc:
            raise FailedBatchError(str(exc)) from exc
        for gradient in gradients.values():
            gradient.mul_(clipped)
        weights = {name: parameter.detach() for name, parameter in self._weights.items()}
        rule.correct_gradients(
            {name: gradient for name, gradient in gradients.items() if name in self._shared}, weights
        )
        if self._adamw is not None:
            self._adamw.step(gradients, rate, 1.0)
        elif self._torch_optimizer is not None:
            for name, parameter in self._weights.items():
                parameter.grad = gradients[name]
            for group in self._torch_optimizer.param_groups:
                group["lr"] = rate
            self._torch_optimizer.step()
            self._torch_optimizer.zero_grad()


def _make_optimizer(weights: Mapping[str, nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    groups = [
        {"params": [w for w in weights.values() if (w.ndim >= 2) == is_decayed], "weight_decay": decay}
        for is_decayed, decay in ((True, config.weight_decay), (False, 0.0))
    ]
    kind, settings = torch_optimizer(config)
    return kind([group for group in groups if group["params"]], **settings)
