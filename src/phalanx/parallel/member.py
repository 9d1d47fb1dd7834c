"""What every rank does: the same calls in the same order on all of them."""

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch import distributed as dist

from phalanx.errors import FailedBatchError
from phalanx.models import ModelSource, StageSpec, build_stage, estimate_costs, parameter_shapes, partition
from phalanx.objectives import IGNORE
from phalanx.optimizers import OptimizerConfig, clip_coefficient, gradient_norm_squared, learning_rate
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.copies import share_again, share_with_copies
from phalanx.parallel.mesh import Domain
from phalanx.parallel.parameters import Held, by_name, counted_gradients, fill, held_parameters, settle_gradients, whole
from phalanx.parallel.part import StagePart
from phalanx.parallel.pipelining import accumulate, pipelined
from phalanx.parallel.update import MOMENTS, Update
from phalanx.telemetry import PhaseTimer

WEIGHT = "weight"


@dataclass(frozen=True)
class Recipe:
    """What all ranks of a run agree on.

    Attributes:
        parallel: The layout.
        optimizer: Which one.
        batch_size: Sequences of a step, all ranks together.
        microbatches: Parts that each copy's sequences are cut into.
        sequence_length: Tokens of a sequence.
        total_steps: Of the run.
        seed: Of dropout.
        attention: Kernel.
        bf16: Compute in bfloat16 while training.
    """

    parallel: ParallelConfig
    optimizer: OptimizerConfig
    batch_size: int
    microbatches: int
    sequence_length: int
    total_steps: int
    seed: int = 0
    attention: str = "sdpa"
    bf16: bool = False

    def stages(self, source: ModelSource) -> tuple[StageSpec, ...]:
        """The model's layers, balanced over the pipeline by estimated cost."""
        layout = self.parallel.layout
        embedding, head = estimate_costs(source.hub_config)
        return partition(source.num_layers, layout.pp * layout.stages_per_rank, None, embedding, head)


@dataclass(frozen=True)
class Outcome:
    """One applied step: mean loss in nats, and the norm of the whole gradient before clipping."""

    loss: float
    gradient_norm: float


class Member:
    """One rank's parts, optimizer and schedule.

    Args:
        recipe: The same on every rank.
        source: The model; each rank reads its own stages.
        domain: This rank's place.

    Attributes:
        timer: Where the time of this rank goes.

    Raises:
        ModelError: A tensor is missing or wrong.
    """

    def __init__(self, recipe: Recipe, source: ModelSource, domain: Domain) -> None:
        self.timer = PhaseTimer()
        self._recipe = recipe
        self._domain = domain
        self._specs = recipe.stages(source)
        mine = self._specs[domain.pp :: recipe.parallel.pp]
        self._parts = [self._build(source, spec) for spec in mine]
        self._modules: list[nn.Module] = [share_with_copies(part, domain) for part in self._parts]
        self._held = [one for part in self._parts for one in held_parameters(part, domain)]
        self._update = Update(self._held, recipe.optimizer, domain)
        self._catalogue = _catalogue(source, self._specs)
        self._num_targets = 1
        self._losses: list[Tensor] = []
        rows = recipe.batch_size // (recipe.parallel.dp * recipe.microbatches)
        if recipe.parallel.pp == 1:
            self._run = accumulate(self._modules[0], domain, recipe.microbatches, self._loss)
        else:
            shape = (rows, recipe.sequence_length)
            self._run = pipelined(self._parts, self._modules, domain, shape, recipe.microbatches, self._loss)

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return len(self._specs)

    def step(self, step: int, ids: Tensor, labels: Tensor) -> Outcome:
        """Run one optimizer step on a whole batch.

        Args:
            step: From 0.
            ids: int64 ``[batch, seq]``, the same on every rank.
            labels: Next tokens, likewise.

        Raises:
            FailedBatchError: Nothing to predict, or loss or gradient not finite, on every rank alike; nothing was
                updated.
        """
        domain, timer = self._domain, self.timer
        self._num_targets = int((labels != IGNORE).sum())
        if not self._num_targets:
            raise FailedBatchError(f"step {step}: the batch has no token to predict")
        self._losses.clear()
        self._seed(step)
        with timer.phase("compute"):
            self._run(self._own_rows(ids), self._own_labels(labels))
        with timer.phase("reduce"):
            settle_gradients(self._held, domain)
            norm, loss = self._norm_and_loss()
        if not (math.isfinite(norm) and math.isfinite(loss)):
            self._update.clear()
            raise FailedBatchError(
                f"step {step}: loss {loss}, gradient norm {norm}; lower optimizer.lr or set optimizer.clip_norm"
            )
        with timer.phase("update"):
            config = self._recipe.optimizer
            lr = learning_rate(config, step, self._recipe.total_steps)
            self._update.step(lr, clip_coefficient(norm, config.clip_norm))
        return Outcome(loss, norm)

    @torch.no_grad()
    def evaluate(self, ids: Tensor, labels: Tensor) -> tuple[float, int]:
        """Summed loss and number of targets of a batch, the same on every rank; rows are a multiple of dp."""
        ids, labels = self._own_rows(ids), self._own_labels(labels)
        total = torch.zeros(2, dtype=torch.float64)
        for part in self._parts:
            part.eval()
        for part in self._parts:
            # not through DDP, which has nothing to say without a backward pass
            y = part(ids if part.stage.spec.is_first else self._receive(part, len(ids)))
            if not part.stage.spec.is_last:
                self._send(part, y)
                continue
            loss = part.loss(y, labels)
            if self._domain.tp == 0:
                total[0], total[1] = float(loss), int((labels != IGNORE).sum())
        for part in self._parts:
            part.train()
            share_again(part)
        dist.all_reduce(total)
        return float(total[0]), int(total[1])

    @torch.no_grad()
    def collect(self, stage: int) -> dict[str, Tensor]:
        """Bring one stage's whole tensors to rank 0: ``weight/...`` and moments; other ranks get none."""
        domain = self._domain
        owner = stage % self._recipe.parallel.pp
        found: dict[str, Tensor] = {}
        mine = by_name([one for one in self._held if not one.is_second])
        for kind, name, shape in self._tensors(stage):
            key = f"{kind}/{name}"
            if domain.pp == owner:
                one = mine[name][0]
                value = one.parameter if kind == WEIGHT else self._update.moment(one, kind)
                full = whole(one, value, domain)
                if dist.get_rank() == 0:
                    # not a view of what the next step changes
                    found[key] = full.clone()
                elif domain.is_leader:
                    dist.send(full.contiguous(), dst=0)
            elif dist.get_rank() == 0:
                found[key] = torch.empty(shape)
                dist.recv(found[key], src=domain.leader_of(owner))
        return found

    @torch.no_grad()
    def load(self, num_steps: int, stage: int, tensors: dict[str, Tensor] | None) -> None:
        """Take one stage's state from rank 0, whatever layout it was saved under.

        Args:
            num_steps: Steps that the optimizer has made.
            stage: Which one.
            tensors: As `collect` names them; on rank 0 alone.
        """
        mine = by_name(self._held)
        for kind, name, shape in self._tensors(stage):
            full = torch.empty(shape) if tensors is None else tensors[f"{kind}/{name}"].contiguous()
            dist.broadcast(full, src=0)
            for one in mine.get(name, ()):
                place = one.parameter if kind == WEIGHT else self._update.target(one, kind, num_steps)
                if place is not None:
                    fill(one, place, full, self._domain)

    @torch.no_grad()
    def held_state(self) -> Iterator[tuple[int, Held, Tensor]]:
        """What this rank has of each tensor of the state, with its number in the catalogue; for all ranks together."""
        mine = by_name([one for one in self._held if not one.is_second])
        numbers = itertools.count()
        for stage in range(self.num_stages):
            for kind, name, _ in self._tensors(stage):
                number = next(numbers)
                if name in mine:
                    one = mine[name][0]
                    yield number, one, one.parameter if kind == WEIGHT else self._update.moment(one, kind)

    def catalogue(self) -> list[list[tuple[str, tuple[int, ...]]]]:
        """Names and whole shapes of the tensors of each stage, as `collect` has them."""
        stages = range(self.num_stages)
        return [[(f"{kind}/{name}", shape) for kind, name, shape in self._tensors(stage)] for stage in stages]

    def names(self, stage: int) -> list[str]:
        """Names of the tensors of a stage, as `collect` and `load` have them."""
        return [f"{kind}/{name}" for kind, name, _ in self._tensors(stage)]

    def _tensors(self, stage: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        for kind in (WEIGHT, *MOMENTS[self._recipe.optimizer.kind]):
            for name, shape in self._catalogue[stage]:
                yield kind, name, shape

    def _build(self, source: ModelSource, spec: StageSpec) -> StagePart:
        recipe = self._recipe
        stage = build_stage(
            source,
            spec,
            adapter=None,
            activation_checkpointing=False,
            attention="eager" if recipe.attention == "eager" else "sdpa",
            seed=recipe.seed,
            device=str(self._domain.device),
        )
        return StagePart(stage, self._domain, bf16=recipe.bf16)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        part = self._parts[-1]
        total = part.loss(logits, labels)
        self._losses.append(total.detach())
        # copies average their gradients, the step wants their sum
        return total * (self._recipe.parallel.copies / self._num_targets)

    def _norm_and_loss(self) -> tuple[float, float]:
        gradients = dict(counted_gradients(self._held, self._domain))
        sums = torch.zeros(2, dtype=torch.float64)
        sums[0] = gradient_norm_squared(gradients)
        if self._losses and self._domain.tp == 0:
            sums[1] = sum(float(loss) for loss in self._losses)
        dist.all_reduce(sums)
        square = float(sums[0])
        return (math.sqrt(square) if square >= 0 else math.nan), float(sums[1]) / self._num_targets

    def _own_rows(self, x: Tensor) -> Tensor:
        return x.chunk(self._recipe.parallel.dp)[self._domain.dp].to(self._domain.device)

    def _own_labels(self, labels: Tensor) -> Tensor:
        return self._parts[-1].own_labels(self._own_rows(labels)).contiguous()

    def _receive(self, part: StagePart, rows: int) -> Tensor:
        size = part.stage.hidden_shape(rows, self._recipe.sequence_length // part.slices)
        x = torch.empty(size, device=self._domain.device)
        previous = (part.stage.spec.index - 1) % self._recipe.parallel.pp
        dist.recv(x, src=self._domain.peer(previous), group=self._domain.pipeline)
        return x

    def _send(self, part: StagePart, y: Tensor) -> None:
        following = (part.stage.spec.index + 1) % self._recipe.parallel.pp
        dist.send(y.contiguous(), dst=self._domain.peer(following), group=self._domain.pipeline)

    def _seed(self, step: int) -> None:
        domain = self._domain
        # ranks that do the same work must drop the same numbers
        place = (domain.pp, domain.copy, domain.tp if self._recipe.parallel.sequence_parallel else 0)
        text = f"phalanx parallel {self._recipe.seed} {step} {place}"
        torch.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))


def _catalogue(source: ModelSource, specs: Sequence[StageSpec]) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Names and shapes of the whole model's parameters by stage; a tied head is the first stage's embedding."""
    family = source.family
    found: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in specs]
    blocks = f"{family.trunk}.{family.blocks}."
    first = tuple(f"{family.trunk}.{part}." for part in family.first_parts)
    for name, shape in parameter_shapes(source.hub_config).items():
        if name.startswith(blocks):
            layer = int(name.removeprefix(blocks).partition(".")[0])
            index = next(spec.index for spec in specs if spec.first_layer <= layer < spec.end_layer)
        else:
            index = 0 if name.startswith(first) else len(specs) - 1
        found[index].append((name, shape))
    return found
