"""The training of a rank with differential privacy: `RankTrainer`, with a private gradient in each step."""

import math
import os
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch import distributed as dist

from phalanx.data import IGNORE, without_attention
from phalanx.engine import NO_EXTRAS, NO_LIMITS, StepLimits
from phalanx.errors import ConfigError
from phalanx.models import ModelSource
from phalanx.optimizers import clip_coefficient, learning_rate
from phalanx.parallel.control.rank_trainer import AppliedStep, RankRecipe, RankTrainer, TargetRows
from phalanx.parallel.groups.mesh import Domain
from phalanx.parallel.privacy.row_gradients import RowGradients
from phalanx.security.privacy import SEED_BYTES, SecureStream, gaussian_noise


class PrivateRankTrainer(RankTrainer):
    """One rank of a run with a section ``[privacy]``; every rank has the whole model and some of the rows.

    A step's gradient is the sum of its rows' clipped gradients and Gaussian noise, over the number of rows that a
    sample has in the mean. The number of rows that were drawn divides nothing, for it depends on whether a row was.

    Args:
        recipe: The same on every rank, with its `privacy`.
        noise_multiplier: Noise multiplier that rank 0 computed, whatever other ranks are told.
        fresh: Draws random bytes; another one than the system's generator is for tests.

    Guarantees:
        Noise and dropout of a step are drawn from the system's generator when they are due, and are neither stored nor
        ever the same again. Ranks add noise once.
    """

    def __init__(
        self,
        recipe: RankRecipe,
        source: ModelSource,
        domain: Domain,
        noise_multiplier: float = math.nan,
        fresh: Callable[[int], bytes] = os.urandom,
    ) -> None:
        super().__init__(recipe, source, domain)
        if recipe.privacy is None:
            raise ConfigError("privacy: the run file has no such section")
        self._rows = RowGradients(self._parts[0], recipe.privacy)
        self._fresh = fresh
        multiplier = torch.tensor([noise_multiplier], dtype=torch.float64)
        dist.broadcast(multiplier, src=0)
        if not math.isfinite(float(multiplier)):
            raise ConfigError("privacy: rank 0 has not said how much noise there is")
        self._deviation = float(multiplier) * recipe.privacy.clip_norm

    def train_step(
        self,
        step: int,
        ids: Tensor,
        labels: Tensor,
        extras: Mapping[str, Tensor] = NO_EXTRAS,
        limits: StepLimits = NO_LIMITS,
    ) -> AppliedStep:
        """Run one optimizer step on a sample, which may be empty: rows without targets count for nothing.

        Args:
            limits: Of no effect: whether a private step is applied must not depend on its rows.
        """
        recipe = self._recipe
        self._seed_step(step)
        # with a seed that others know, which of a row's values are dropped would tell how many rows stand before it
        torch.manual_seed(int.from_bytes(self._shared_seed()[:7], "big"))
        with self.timer.time_phase("compute"):
            self._targets = TargetRows(self._own_labels(labels), self._own_extras(without_attention(extras)))
            own_ids, seen = self._own_rows(ids), self._own_mask_rows(extras)
            total, loss = self._rows.zero_total(), torch.zeros((), dtype=torch.float64)

            def losses(numbers: Tensor) -> Tensor:
                return self._row_losses(own_ids[numbers], None if seen is None else seen[numbers], numbers)

            for part in self._targets.row_numbers.chunk(recipe.microbatches):
                loss += self._rows.add_rows(losses, part, total).sum(dtype=torch.float64).cpu()
        with self.timer.time_phase("reduce"):
            norm = self._add_up(total, loss)
        with self.timer.time_phase("update"):
            self._rows.set_gradients(total)
            # of the noisy sum, so it tells no more
            clipped = clip_coefficient(norm, recipe.optimizer.clip_norm)
            lr = learning_rate(recipe.optimizer, step // recipe.steps_a_rate, recipe.total_steps)
            self._update.step(lr, clipped)
        rows = int((labels != IGNORE).any(1).sum())
        return AppliedStep(float(loss) / max(1, rows), norm)

    def _row_losses(self, ids: Tensor, seen: Tensor | None, numbers: Tensor) -> Tensor:
        """The mean loss of each row over its own targets."""
        logits = self._parts[0](ids, seen)
        labels, extras = self._targets.select_rows(numbers)
        row_losses = []
        # split, not slices: the backward pass of each slice would fill and add gradients of all rows
        for row, row_logits in enumerate(logits.split(1)):
            rows = slice(row, row + 1)
            loss, targets = self._learned(row_logits, labels[rows], {name: of[rows] for name, of in extras.items()})
            row_losses.append(loss / max(1, targets))
        return torch.stack(row_losses)

    @torch.no_grad()
    def _add_up(self, total: list[Tensor], loss: Tensor) -> float:
        """Join the ranks' sums, add noise, divide; return the norm of the result."""
        if self._recipe.parallel.num_copies > 1:
            for tensor in (*total, loss):
                dist.all_reduce(tensor)
        stream, squares = SecureStream(self._shared_seed()), 0.0
        for tensor in total:
            noise = gaussian_noise(stream, tensor.numel(), self._deviation)
            tensor.add_(torch.from_numpy(noise).view_as(tensor).to(tensor.device)).div_(self._recipe.batch_size)
            squares += float(tensor.norm()) ** 2
        return math.sqrt(squares)

    def _shared_seed(self) -> bytes:
        """Draw a seed on rank 0, and tell it to the others: what all of them add is the same noise, once."""
        seed = torch.zeros(SEED_BYTES, dtype=torch.uint8)
        if dist.get_rank() == 0:
            seed = torch.tensor(list(self._fresh(SEED_BYTES)), dtype=torch.uint8)
        dist.broadcast(seed, src=0)
        return bytes(seed.tolist())
