"""The runner of one stage's microbatches: forward, backward, the gradient's norm, and what audits recompute."""

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from phalanx.engine import NO_EXTRAS
from phalanx.errors import ModelError
from phalanx.exact import ExactArithmetic, is_grade
from phalanx.models import StageModule, StageSpec
from phalanx.objectives import OBJECTIVES, Objective
from phalanx.optimizers import gradient_norm_squared
from phalanx.pipeline.plan import Numerics

# as where the whole gradient is clipped
_EPS = 1e-6


@runtime_checkable
class RunnableStage(Protocol):
    """The module that a runner calls: a stage's, or one rank's slices of it."""

    @property
    def shared_head(self) -> nn.Parameter | None:
        """The parameter of a tied head, at the last stage."""

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer moves, by name."""

    def __call__(self, x: Tensor) -> Tensor:
        """Run the stage."""


class StageRunner:
    """One stage's module with its graphs in flight.

    Dropout draws from a generator that is seeded by (seed, step, stage, microbatch), so that an
    auditor's recomputation and a redone step see the same masks.

    With `row_clip` each microbatch is one row, its gradient in this stage is scaled down to that norm before it is
    added up, and its loss is the mean over its own targets. One that is not finite counts for nothing.

    Args:
        precision: See `StepPlan.arithmetic`.
    """

    row_clip: float | None = None

    def __init__(
        self,
        module: RunnableStage,
        spec: StageSpec,
        *,
        seed: int,
        precision: str,
        device: str,
        row_clip: float | None = None,
    ) -> None:
        # its readers have a whole stage; of slices a runner needs no more than is promised
        self.module = cast("StageModule", module)
        self.spec = spec
        self.seed = seed
        self._bf16 = precision == "bf16"
        self.device = device
        self._law: ExactArithmetic | None = None
        if is_grade(precision):
            self._law = ExactArithmetic(precision, self.module.parameters())
            with self._law:
                self.module.family.restore_buffers(self.module.trunk, self.module.hub_config)
        self._graphs: dict[int, tuple[Tensor, Tensor]] = {}
        self._head: StageRunner | None = None
        self._shared = module.shared_head
        self._noise = getattr(module, "embedding_noise", None)
        self._shared_gradient: Tensor | None = None
        self._wide: dict[str, Tensor] = {}
        self.row_clip = row_clip
        self._rows: dict[str, Tensor] = {}
        if row_clip is not None and self._shared is not None and self._shared.requires_grad:
            raise ModelError("privacy: two stages clip parts of the tied head, so a row can change it beyond its bound")

    def adopt_head(self, last: "StageRunner") -> None:
        """First stage: add the gradient of the tied head, which the last stage keeps apart, to the embedding's.

        Both stages run in one process in an order that depends on when messages arrive; two sums that
        are added once at the end have the same bits whatever that order was.
        """
        self._head = last

    def forward(self, step: int, microbatch: int, x: Tensor) -> Tensor:
        """Run one microbatch and keep its graph.

        Args:
            step: Optimizer step, for the dropout seed.
            x: Token ids ``[batch, seq]`` for the stage that embeds, else hidden ``[batch, seq, dim]``.

        Returns:
            Hidden ``[batch, seq, dim]``, or logits ``[batch, seq, vocab]`` of the last stage, on the CPU.
        """
        x, y = self._run_microbatch(step, microbatch, x)
        self._graphs[microbatch] = (x, y)
        return y.detach().cpu()

    def compute_loss(
        self,
        microbatch: int,
        labels: Tensor,
        num_targets: int,
        extras: Mapping[str, Tensor] = NO_EXTRAS,
        objective: Objective = OBJECTIVES["causal_lm"],
    ) -> float:
        """Turn the last stage's logits into the loss; its backward pass comes next.

        Args:
            labels: Next tokens ``[batch, seq]``.
            num_targets: Target tokens in the whole step, so that microbatches add up to the batch's mean; where rows
                are clipped, those of the row alone.
            extras: More rows, as the objective reads them.

        Returns:
            The sum of the token losses of this microbatch, in nats.
        """
        x, logits = self._graphs[microbatch]
        with self._law or nullcontext():
            total, own_targets = objective(logits, labels.to(logits.device), extras)
            loss = total / (num_targets if self.row_clip is None else max(1, own_targets))
        self._graphs[microbatch] = (x, loss)
        return float(total.detach())

    def backward(self, step: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Add this microbatch's weight gradients and return the gradient of its input.

        Args:
            gradient: Gradient of the output, or None at the last stage, which starts from its loss.

        Returns:
            Gradient of the input ``[batch, seq, dim]`` on the CPU; None at the first stage.
        """
        x, y = self._graphs.pop(microbatch)
        self._swap_shared()
        with self._law or nullcontext():
            torch.autograd.backward(y, None if gradient is None else gradient.to(y.device, y.dtype))
        self._widen_gradients()
        self._swap_shared()
        if self.row_clip is not None:
            self._add_clipped(self.row_clip)
        return None if x.grad is None else x.grad.cpu()

    def recompute_microbatch(
        self, step: int, microbatch: int, x: Tensor, gradient: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Forward and input-backward from committed inputs; weight gradients are neither needed nor touched.

        Returns:
            The output, and the gradient of the input when `gradient` is given.
        """
        if gradient is None:
            with torch.no_grad():
                _, y = self._run_microbatch(step, microbatch, x)
            return y.cpu(), None
        x, y = self._run_microbatch(step, microbatch, x)
        with self._law or nullcontext():
            (x_gradient,) = torch.autograd.grad(y, x, gradient.to(y.device, y.dtype))
        return y.detach().cpu(), x_gradient.cpu()

    def redo_microbatch(
        self, step: int, microbatch: int, x: Tensor, gradient: Tensor, names: Collection[str] | None = None
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """All of the stage's work on one microbatch; no other one may be under way.

        Args:
            names: Parameters whose gradients are computed, at least one; None for all. Rows that are clipped need all.

        Returns:
            The output, the gradient of the input, and the weight gradients of this microbatch alone, by name.
        """
        with self.limit_gradients(names):
            y = self.forward(step, microbatch, x)
            x_gradient = self.backward(step, microbatch, gradient)
        gradients = self.take_gradients()
        return y, x_gradient, {name: gradients[name] for name in (gradients if names is None else names)}

    def limit_gradients(self, names: Collection[str] | None) -> AbstractContextManager[None]:
        """Leave the gradients of other parameters (None: of none) out of what runs inside; all else has its bits."""
        parameters = self.module.trainable_parameters() | getattr(self.module, "computing", {})
        return _frozen([] if names is None else [value for name, value in parameters.items() if name not in names])

    def take_gradients(self) -> dict[str, Tensor]:
        """Weight gradients added up since the last call, by name; a parameter that got none has zeros."""
        parameters = self.module.trainable_parameters()
        taken = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in parameters.items()
        } | (self._wide if self.row_clip is None else self._rows)
        self._clear_gradients()
        if self._head is not None:
            self._head.add_shared(taken, parameters | getattr(self.module, "computing", {}))
        return taken

    def add_shared(self, gradients: dict[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        """Add the tied head's gradient to that of the same parameter under the first stage's name."""
        for name, parameter in parameters.items():
            if parameter is self._shared and self._shared_gradient is not None:
                gradients[name] = gradients[name] + self._shared_gradient
        self._shared_gradient = None

    def abandon_step(self) -> None:
        """Forget graphs and gradients of a step that will be redone."""
        self._graphs.clear()
        self._shared_gradient = None
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        self._wide, self._rows = {}, {}
        for parameter in self.module.trainable_parameters().values():
            parameter.grad = None

    def _add_clipped(self, bound: float) -> None:
        """Add the gradient of the row that came last to the sum, at most so long."""
        gradients = {
            name: parameter.grad
            for name, parameter in self.module.trainable_parameters().items()
            if parameter.grad is not None
        }
        for parameter in self.module.trainable_parameters().values():
            parameter.grad = None
        norm = math.sqrt(gradient_norm_squared(gradients))
        if not math.isfinite(norm):
            return
        weight = min(1.0, bound / (norm + _EPS))
        for name, gradient in gradients.items():
            gradient.mul_(weight)
            self._rows[name] = self._rows[name].add_(gradient) if name in self._rows else gradient

    def _widen_gradients(self) -> None:
        """Add gradients of narrow weights up in float32, microbatch by microbatch, where there are masters."""
        for name, parameter in getattr(self.module, "computing", {}).items():
            if parameter.grad is not None:
                wide_gradient = parameter.grad.to(torch.float32)
                self._wide[name] = self._wide[name] + wide_gradient if name in self._wide else wide_gradient
                parameter.grad = None
        if self._shared is not None and self._shared.grad is not None and self._shared.dtype != torch.float32:
            wide_gradient = self._shared.grad.to(torch.float32)
            self._shared_gradient = (
                wide_gradient if self._shared_gradient is None else self._shared_gradient + wide_gradient
            )
            self._shared.grad = None

    def _swap_shared(self) -> None:
        if self._shared is not None and self._shared.dtype == torch.float32:
            self._shared.grad, self._shared_gradient = self._shared_gradient, self._shared.grad

    def _run_microbatch(self, step: int, microbatch: int, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().to(self.device)
        if not self.spec.is_first:
            x.requires_grad_(torch.is_grad_enabled())
        self._seed_dropout(dropout_seed(self.seed, step, self.spec.index, microbatch))
        if self._noise is not None:
            self._noise.begin_step(self.seed, step)
        with self._law or self._autocast_context():
            return x, self.module(x)

    def _seed_dropout(self, seed: int) -> None:
        # torch.manual_seed formats the whole call stack for every kind of device that is not there
        torch.default_generator.manual_seed(seed)
        if self.device != "cpu":
            torch.cuda.manual_seed_all(seed)

    def _autocast_context(self) -> AbstractContextManager[object]:
        if not self._bf16:
            return nullcontext()
        return torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16)


@contextmanager
def _frozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let trained parameters ask for no gradient for a while."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def dropout_seed(seed: int, step: int, stage: int, microbatch: int) -> int:
    """Seed of one microbatch's dropout masks in one stage."""
    text = f"phalanx dropout {seed} {step} {stage} {microbatch}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def finite_norm_squared(gradients: Mapping[str, Tensor], numerics: Numerics) -> float | None:
    """Squared norm of all gradients together; None when it is not finite, for JSON has no word for that."""
    value = gradient_norm_squared(dict(gradients), exact=numerics != "float")
    return value if value < float("inf") else None
