"""The training of every rank: the same calls in the same order on all of them."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch import distributed as dist

from phalanx.data import DOCUMENTS, PREFIX, without_attention
from phalanx.engine import NO_EXTRAS, NO_LIMITS, StepLimits
from phalanx.errors import ConfigError, FailedBatchError
from phalanx.models import (
    AttentionKind,
    ModelSource,
    SlicedAdapter,
    StageSpec,
    add_embedding_noise,
    build_stage,
    estimate_costs,
    partition_layers,
)
from phalanx.models.master_weights import NARROW
from phalanx.objectives import (
    IGNORE,
    ROW_LABELS,
    ExtraRows,
    Objective,
    ObjectiveSettings,
    causal_lm_loss,
    kind_of,
    objective_of,
)
from phalanx.optimizers import OptimizerConfig, clip_coefficient, gradient_norm_squared, learning_rate
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.control.pipelining import accumulate_gradients, build_pipeline
from phalanx.parallel.data.data_parallel import (
    gather_exactly,
    gather_for_training,
    share_again,
    share_with_copies,
)
from phalanx.parallel.data.diloco import OuterStep
from phalanx.parallel.data.parameters import RankParameter, counted_gradients, held_parameters, settle_gradients
from phalanx.parallel.data.state_dict import StateGatherer, parameter_catalogue
from phalanx.parallel.data.update import LossScale, RankOptimizer
from phalanx.parallel.groups.mesh import Domain
from phalanx.parallel.model.part import StagePart
from phalanx.parallel.model.recompute import fuse_activations
from phalanx.security.privacy import PrivacyConfig
from phalanx.telemetry import PhaseTimer

_OF_ATTENTION: dict[str, ExtraRows] = {DOCUMENTS: ExtraRows("int64"), PREFIX: ExtraRows("int64", per_token=False)}
"""The rows that attention reads, by its kind."""
_NARROW = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "bf16_weights": None}
"""Types of autocast."""


@dataclass(frozen=True)
class RankRecipe:
    """The recipe that all ranks of a run agree on.

    Attributes:
        microbatches: Parts that each copy's sequences are cut into.
        attention: Name of the attention kernel.
        precision: "fp32"; "bf16" and "fp16" compute in that type while training, around parameters in float32. With
            "bf16_weights" copies gather bf16 parameters from their float32 shares; with zero 2 or 3.
        adapter: Adapter; None where all parameters are trained.
        objective: Objective for `objective_of`; see `check_objective` for the limits of a layout.
        attends: Kind of mask; the mask's rows come with every batch.
        neftune_alpha: Size of the noise that is added to embeddings.
        privacy: Clipping of each row's gradient, and noise; None for neither.
        steps_a_rate: Consecutive steps with one learning rate: the steps of a federated round; `total_steps` counts
            rounds then.
    """

    parallel: ParallelConfig
    optimizer: OptimizerConfig
    batch_size: int
    microbatches: int
    sequence_length: int
    total_steps: int
    seed: int = 0
    attention: str = "sdpa"
    precision: Literal["fp32", "bf16", "fp16", "bf16_weights"] = "fp32"
    adapter: SlicedAdapter | None = None
    objective: str | ObjectiveSettings = "causal_lm"
    attends: AttentionKind = "causal"
    neftune_alpha: float | None = None
    privacy: PrivacyConfig | None = None
    steps_a_rate: int = 1

    def balance_stages(self, source: ModelSource) -> tuple[StageSpec, ...]:
        """The model's layers, balanced over the pipeline by estimated cost."""
        layout = self.parallel.planned_layout
        embedding, head = estimate_costs(source.hub_config)
        return partition_layers(source.num_layers, layout.pp * layout.stages_per_rank, None, embedding, head)


@dataclass(frozen=True)
class AppliedStep:
    """One applied step: mean loss in nats, and the norm of the whole gradient before clipping.

    Attributes:
        microbatch_losses: Loss of each microbatch of each copy, in the order of the rows of the batch, where several
            objectives learn at once; else empty.
    """

    loss: float
    gradient_norm: float
    microbatch_losses: tuple[float, ...] = ()


class RankTrainer:
    """One rank's parts, optimizer and schedule.

    Args:
        recipe: The same on every rank.
        source: The model; each rank reads its own stages.
    """

    def __init__(self, recipe: RankRecipe, source: ModelSource, domain: Domain) -> None:
        self.timer = PhaseTimer()
        self._recipe = recipe
        self._domain = domain
        learned = self._learned = check_objective(recipe)
        of_attention: dict[str, ExtraRows] = {
            name: kind for name, kind in _OF_ATTENTION.items() if name == recipe.attends
        }
        if recipe.parallel.cp > 1:
            self._learned = learned.for_row_parts()
        self._counts_rows = ROW_LABELS in self._learned.extras
        self.objective = replace(learned, extras={**learned.extras, **of_attention})
        self._specs = recipe.balance_stages(source)
        mine = self._specs[domain.pp :: recipe.parallel.pp]
        self._parts = [self._build_part(source, spec) for spec in mine]
        # private gradients are of single rows, and are joined once they are clipped
        is_private = recipe.privacy is not None
        gathered = NARROW if recipe.precision == "bf16_weights" else None
        self._modules = [part if is_private else share_with_copies(part, domain, gathered) for part in self._parts]
        self._held = [parameter for part in self._parts for parameter in held_parameters(part, domain)]
        self._update = RankOptimizer(self._held, recipe.optimizer, domain)
        self._outer = _outer_step(self._held, domain)
        stages = parameter_catalogue(source, self._specs, recipe.adapter)
        self._keeper = StateGatherer(stages, self._held, self._update, self._outer, domain, recipe.optimizer)
        self._scale = LossScale(is_needed=recipe.precision == "fp16")
        self._num_targets = 1
        self._targets = TargetRows(torch.empty(0, 0), {})
        self._losses: list[Tensor] = []
        rows = recipe.batch_size // (recipe.parallel.dp * recipe.microbatches)
        if recipe.parallel.pp == 1:
            self._run = accumulate_gradients(self._modules[0], domain, recipe.microbatches, self._compute_loss)
        else:
            shape = (rows, recipe.sequence_length)
            self._run = build_pipeline(
                self._parts, self._modules, domain, shape, recipe.microbatches, self._compute_loss
            )

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return len(self._specs)

    def train_step(
        self,
        step: int,
        ids: Tensor,
        labels: Tensor,
        extras: Mapping[str, Tensor] = NO_EXTRAS,
        limits: StepLimits = NO_LIMITS,
    ) -> AppliedStep:
        """Run one optimizer step on a whole batch.

        Args:
            step: Number of the step, from 0.
            ids: int64 ``[batch, seq]``, the same on every rank.
            labels: Next tokens, ``[batch, seq]``.
            extras: More rows, as `objective` has them.

        Raises:
            FailedBatchError: Nothing to predict, or loss or gradient not finite, or a spike by the limits, on every
                rank alike; nothing was updated.
        """
        timer, config = self.timer, self._recipe.optimizer
        all_targets = self.objective.count_targets(labels)
        if not all_targets:
            raise FailedBatchError(f"step {step}: the batch has no token to predict")
        self._num_targets = max(1, self.objective.count_targets(self._island_rows(labels)))
        loss, norms, parts = self._compute_gradients(step, ids, labels, extras)
        scale = self._scale.value
        while math.isfinite(loss) and not all(map(math.isfinite, norms)) and self._scale.halve_scale():
            self._update.clear_gradients()
            loss, norms, parts = self._compute_gradients(step, ids, labels, extras)
        if not all(map(math.isfinite, norms)):
            # no scale was to blame, and the small gradients of later batches need it
            self._scale.value = scale
        mean_loss, norm = loss / all_targets, math.hypot(*norms) / math.sqrt(len(norms))
        fault = limits.find_fault(step, mean_loss, norm)
        if fault is not None:
            self._update.clear_gradients()
            raise fault
        with timer.time_phase("update"):
            lr = learning_rate(config, step // self._recipe.steps_a_rate, self._recipe.total_steps)
            clipped = clip_coefficient(norms[self._domain.island], config.clip_norm)
            self._update.step(lr * limits.rate_factor, clipped / self._scale.value)
            self._scale.note_applied_step()
        if self._outer is not None and self._outer.is_due(step + 1):
            with timer.time_phase("outer"):
                self._outer.step()
        return AppliedStep(mean_loss, norm, parts)

    @torch.no_grad()
    def evaluate_batch(
        self, ids: Tensor, labels: Tensor, extras: Mapping[str, Tensor] = NO_EXTRAS
    ) -> tuple[float, int]:
        """Summed loss and number of targets of a batch, the same on every rank; rows are a multiple of dp."""
        ids, labels = self._own_rows(ids), self._own_labels(labels)
        seen = self._own_mask_rows(extras)
        total = torch.zeros(2, dtype=torch.float64)
        for part in self._parts:
            part.eval()
            gather_exactly(part, self._recipe.parallel)
        for part in self._parts:
            # not through DDP, which has nothing to say without a backward pass
            y = part(ids if part.stage.spec.is_first else self._receive_rows(part, len(ids)), seen)
            if not part.stage.spec.is_last:
                following = (part.stage.spec.index + 1) % self._recipe.parallel.pp
                dist.send(y.contiguous(), dst=self._domain.peer_rank(following), group=self._domain.pipeline)
                continue
            loss = part.slice_loss(y, labels)
            if self._domain.tp == 0:
                total[0], total[1] = float(loss), int((labels != IGNORE).sum())
        for part in self._parts:
            part.train()
            share_again(part)
            gather_for_training(part, self._recipe.parallel)
        dist.all_reduce(total)
        return float(total[0]), int(total[1])

    def collect_stage(self, stage: int) -> dict[str, Tensor]:
        """Bring one stage's whole tensors to rank 0: ``weight/...``, moments, what joins islands; others get none."""
        return self._keeper.gather_stage(stage)

    def load_stage(self, num_steps: int, stage: int, tensors: dict[str, Tensor] | None) -> None:
        """Take one stage's state from rank 0, whatever layout it was saved under.

        Args:
            num_steps: Steps that the optimizer has made.
            tensors: Tensors by the names of `collect_stage`; on rank 0 alone.
        """
        self._keeper.spread_stage(num_steps, stage, tensors)

    def held_state(self) -> Iterator[tuple[int, RankParameter, Tensor]]:
        """Yield this rank's part of each tensor of the state, with its number in the catalogue."""
        return self._keeper.held_tensors()

    def state_catalogue(self) -> list[list[tuple[str, tuple[int, ...]]]]:
        """Names and whole shapes of the tensors of each stage, as `collect_stage` returns them."""
        return self._keeper.stage_catalogues()

    def tensor_names(self, stage: int) -> list[str]:
        """Names of the tensors of a stage, as in `collect_stage` and `load_stage`."""
        return self._keeper.stage_tensor_names(stage)

    def _build_part(self, source: ModelSource, spec: StageSpec) -> StagePart:
        recipe = self._recipe
        stage = build_stage(
            source,
            spec,
            adapter=recipe.adapter,
            activation_checkpointing=False,
            attention="eager" if recipe.attention == "eager" else "sdpa",
            seed=recipe.seed,
            device=str(self._domain.device),
        )
        stage.attends = recipe.attends
        fuse_activations(stage)
        part = StagePart(stage, self._domain, narrow=_NARROW[recipe.precision])
        # after the embedding was cut
        add_embedding_noise(stage, recipe.neftune_alpha)
        return part

    def _compute_loss(self, logits: Tensor, numbers: Tensor) -> Tensor:
        part, (labels, extras) = self._parts[-1], self._targets.select_rows(numbers)
        is_usual = self._learned.loss is causal_lm_loss
        total = part.slice_loss(logits, labels) if is_usual else self._learned(logits, labels, extras)[0]
        self._losses.append(total.detach())
        # copies average their gradients, the step wants their sum
        return total * (self._scale.value * self._recipe.parallel.copies_per_island / self._num_targets)

    def _compute_gradients(
        self, step: int, ids: Tensor, labels: Tensor, extras: Mapping[str, Tensor]
    ) -> tuple[float, list[float], tuple[float, ...]]:
        """Forward and backward; summed loss of all ranks, norms of islands' gradients, and losses of microbatches."""
        self._losses.clear()
        self._seed_step(step)
        for part in self._parts:
            # copies average their gradients, so each weighs its own microbatches
            part.stage.router_share = self._scale.value / self._recipe.microbatches
        with self.timer.time_phase("compute"):
            own_extras = self._own_extras(without_attention(extras))
            if self._counts_rows:
                own_extras[ROW_LABELS] = self._own_rows((labels != IGNORE).sum(dim=1))
            self._targets = TargetRows(self._own_labels(labels), own_extras)
            self._run(self._own_rows(ids), self._targets.row_numbers, self._own_mask_rows(extras))
        with self.timer.time_phase("reduce"):
            settle_gradients(self._held, self._domain)
            return self._loss_and_norms()

    def _loss_and_norms(self) -> tuple[float, list[float], tuple[float, ...]]:
        gradients = dict(counted_gradients(self._held, self._domain))
        layout, microbatches = self._recipe.parallel, self._recipe.microbatches
        is_mixed, first = self.objective.target == "step", 1 + layout.num_islands
        sums = torch.zeros(first + (layout.dp * microbatches if is_mixed else 0), dtype=torch.float64)
        if self._losses and self._domain.tp == 0:
            losses = [float(loss) for loss in self._losses]
            sums[0] = sum(losses)
            if is_mixed:
                # the last stage meets the microbatches of its copy in their order
                own = first + self._domain.dp * microbatches
                sums[own : own + microbatches] = torch.tensor(losses, dtype=torch.float64)
        sums[1 + self._domain.island] = gradient_norm_squared(gradients)
        dist.all_reduce(sums)
        loss, *rest = sums.tolist()
        squares, parts = rest[: first - 1], rest[first - 1 :]
        norms = [math.sqrt(square) / self._scale.value if square >= 0 else math.nan for square in squares]
        return loss, norms, tuple(parts)

    def _own_rows(self, x: Tensor) -> Tensor:
        return x.chunk(self._recipe.parallel.dp)[self._domain.dp].to(self._domain.device)

    def _own_mask_rows(self, extras: Mapping[str, Tensor]) -> Tensor | None:
        """Return the mask rows of this rank's rows; None where they have none."""
        rows = extras.get(self._recipe.attends)
        return None if rows is None else self._own_rows(rows)

    def _island_rows(self, x: Tensor) -> Tensor:
        return x.chunk(self._recipe.parallel.num_islands)[self._domain.island]

    def _own_labels(self, labels: Tensor) -> Tensor:
        return self._parts[-1].own_labels(self._own_rows(labels)).contiguous()

    def _own_extras(self, extras: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: self._own_labels(rows) if self.objective.extras[name].per_token else self._own_rows(rows)
            for name, rows in extras.items()
        }

    def _receive_rows(self, part: StagePart, rows: int) -> Tensor:
        size = part.stage.hidden_shape(rows, self._recipe.sequence_length // part.num_slices)
        x = torch.empty(size, device=self._domain.device)
        previous = (part.stage.spec.index - 1) % self._recipe.parallel.pp
        dist.recv(x, src=self._domain.peer_rank(previous), group=self._domain.pipeline)
        return x

    def _seed_step(self, step: int) -> None:
        seed_dropout(self._recipe, step, self._domain)
        shared_seed = _dropout_seed(self._recipe, step, (self._domain.pp, self._domain.copy_index, "shared"))
        for part in self._parts:
            part.begin_step(shared_seed)
            if part.stage.embedding_noise is not None:
                part.stage.embedding_noise.begin_step(self._recipe.seed, step)


@dataclass(frozen=True)
class TargetRows:
    """The data for the loss of a rank's rows. A schedule carries one tensor to it: the rows' numbers."""

    labels: Tensor
    extras: Mapping[str, Tensor]

    @property
    def row_numbers(self) -> Tensor:
        """The numbers of all rows, to be cut as the rows are."""
        return torch.arange(len(self.labels), device=self.labels.device)

    def select_rows(self, numbers: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Labels and extra rows of one microbatch."""
        return self.labels[numbers], {name: rows[numbers] for name, rows in self.extras.items()}


def check_objective(recipe: RankRecipe) -> Objective:
    """Return the objective, if the layout can learn it."""
    objective = objective_of(recipe.objective)
    if objective.own_head:
        raise ConfigError(
            f"parallel: {kind_of(recipe.objective)} has a head of its own, and ranks train a language model's"
        )
    if recipe.parallel.tp > 1 and objective.loss is not causal_lm_loss:
        raise ConfigError(
            f"parallel: tp={recipe.parallel.tp} shares the vocabulary, and of all objectives causal_lm alone is known "
            f"to be a sum over such shares, not {kind_of(recipe.objective)}; set tp to 1"
        )
    if recipe.parallel.cp > 1 and not objective.shares_rows:
        raise ConfigError(
            f"parallel: cp={recipe.parallel.cp} cuts rows, and {kind_of(recipe.objective)} weighs whole ones; set cp "
            "to 1"
        )
    return objective


def seed_dropout(recipe: RankRecipe, step: int, domain: Domain) -> None:
    """Seed the dropout of a step, by the run's seed, the step and the rank's place."""
    # ranks that do the same work must drop the same numbers
    place = (domain.pp, domain.copy_index, domain.tp if recipe.parallel.sequence_parallel else 0)
    torch.manual_seed(_dropout_seed(recipe, step, place))


def _dropout_seed(recipe: RankRecipe, step: int, place: tuple[int | str, ...]) -> int:
    text = f"phalanx parallel {recipe.seed} {step} {place}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _outer_step(held: Sequence[RankParameter], domain: Domain) -> OuterStep | None:
    if domain.config.outer is None or domain.islands is None:
        return None
    return OuterStep(held, domain.config.outer, domain.islands)
