"""The update of one stage, or of a copy of it, and the norm by which the gradients of all stages are clipped."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw

from phalanx.config.extras import require_bitsandbytes
from phalanx.errors import CheckpointError, ModelError, NonFiniteLossError, TrainingError
from phalanx.exact import compute_norm
from phalanx.optimizers import few_bits
from phalanx.optimizers.config import OptimizerConfig
from phalanx.optimizers.few_bits import apply_in_few_bits, new_moments
from phalanx.optimizers.single_rounding import UpdateRule
from phalanx.planner.model.optimizers import OPTIMIZERS


def torch_optimizer(config: OptimizerConfig) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of an optimizer, torch's or one of `few_bits`, and the arguments that it takes of a run file."""
    facts = OPTIMIZERS[config.kind]
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, facts.torch_class, None) or getattr(
        few_bits, facts.torch_class
    )
    return kind, {name: getattr(config, name) for name in facts.settings}


class StageOptimizer:
    """AdamW with a state that exists from the start, has names, and can be undone by one step.

    Gradients are arguments, never ``.grad``, so a shadow can feed the gradients that a stage claims. Two
    holders of one numeric class (same build, threads and device) that make the same steps stay equal bit
    for bit; with `single_rounding`, any two holders. The moments live where the parameters are when this is made.

    Args:
        has_moments: Without them parameters can be loaded and read, at 4 bytes each, but no step can be made.
        single_rounding: Make updates as `UpdateRule` does, with the same bits on every processor, at a lower speed.
        renewed_every: Steps after which a state with zero moments is loaded, from which moments count anew; None where
            an optimizer is never new again.

    With ``adamw8bit`` moments of large tensors are kept in bytes, by bitsandbytes' operator.

    Source: Loshchilov and Hutter 2019 (decoupled weight decay); torch's fused kernel does the arithmetic.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        config: OptimizerConfig,
        *,
        has_moments: bool = True,
        single_rounding: bool = False,
        renewed_every: int | None = None,
    ) -> None:
        self.num_steps = 0
        self._renewed_every = renewed_every
        self._single_rounding = single_rounding
        self._has_moments = has_moments
        self._config = config
        self._names = sorted(parameters)
        self._weights = [parameters[name] for name in self._names]
        if len({id(weight) for weight in self._weights}) != len(self._weights):
            raise ModelError("optimizer: one parameter was given under two names; give tied weights once")
        moved = self._weights if has_moments else []
        self._in_bytes = bool(OPTIMIZERS[config.kind].in_bytes)
        if self._in_bytes:
            require_bitsandbytes(f'optimizer.kind = "{config.kind}"')
        self._moments = [self._new_moments(weight) for weight in moved]
        self._steps = [torch.zeros((), device=weight.device) for weight in self._weights]
        self._scaled: list[torch.Tensor] = []
        self._undo: list[torch.Tensor] = []
        self._undo_steps: int | None = None

    @torch.no_grad()
    def step(self, gradients: Mapping[str, torch.Tensor], lr: float, clip_coefficient: float) -> None:
        """Make one step.

        Args:
            gradients: One for each parameter, of its shape and dtype; they are not changed.
            clip_coefficient: Number that all gradients are multiplied by.

        Raises:
            TrainingError: A gradient is missing, unknown or of another shape or dtype, or a number is not
                finite, or there are no moments. Nothing was changed. Whether the gradients are finite is asked
                of their norm, before.
        """
        if not self._has_moments:
            raise TrainingError("optimizer: has weights and no moments; it follows another one and makes no step")
        if not (math.isfinite(lr) and math.isfinite(clip_coefficient)):
            raise TrainingError(f"optimizer: lr={lr}, clip coefficient={clip_coefficient}; both must be finite")
        scaled = self._scale_gradients(self._ordered_gradients(gradients), clip_coefficient)
        if self._single_rounding or self._in_bytes:
            self._step_one_by_one(scaled, lr)
        else:
            self._step_fused(scaled, lr)
        self.num_steps += 1

    def _step_one_by_one(self, wanted: list[torch.Tensor], lr: float) -> None:
        rule = UpdateRule(lr, self._config.betas, self._config.eps, self._num_updates + 1)
        for weight, gradient, moments, count in zip(self._weights, wanted, self._moments, self._steps, strict=True):
            apply_in_few_bits(rule, weight, gradient, moments, self._config.weight_decay if weight.ndim >= 2 else 0.0)
            count.add_(1)

    def _step_fused(self, wanted: list[torch.Tensor], lr: float) -> None:
        for is_decayed in (True, False):
            members = [i for i, weight in enumerate(self._weights) if (weight.ndim >= 2) == is_decayed]
            if not members:
                continue
            adamw(
                [self._weights[i] for i in members],
                [wanted[i] for i in members],
                [self._moments[i]["exp_avg"] for i in members],
                [self._moments[i]["exp_avg_sq"] for i in members],
                [],
                [self._steps[i] for i in members],
                fused=True,
                amsgrad=False,
                maximize=False,
                lr=lr,
                beta1=self._config.betas[0],
                beta2=self._config.betas[1],
                eps=self._config.eps,
                weight_decay=self._config.weight_decay if is_decayed else 0.0,
            )

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors themselves, not copies: ``weight/`` and each of `moment_names` plus the name.

        With `num_steps` this is all that decides the next step. The order depends on the names only.
        """
        tensors: dict[str, torch.Tensor] = {}
        for i, name in enumerate(self._names):
            tensors[f"weight/{name}"] = self._weights[i].detach()
            if self._has_moments:
                tensors.update({f"{kind}/{name}": moment for kind, moment in self._moments[i].items()})
        return tensors

    def readable_state(self) -> Mapping[str, torch.Tensor]:
        """As `state`, to be read tensor by tensor: one that lies elsewhere comes when it is asked for."""
        return self.state_tensors()

    @property
    def has_moments(self) -> bool:
        """Whether steps can be made."""
        return self._has_moments

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor], num_steps: int) -> None:
        """Copy a state in.

        Raises:
            CheckpointError: Names, shapes or dtypes are not this stage's, or `num_steps` is negative.
                Nothing was changed.
        """
        state = self.state_tensors()
        expect_state(tensors, state, num_steps)
        for name, mine in state.items():
            mine.copy_(tensors[name])
        self._forget_other_past(num_steps)
        self._set_num_steps(num_steps)

    @torch.no_grad()
    def keep_snapshot(self) -> None:
        """Copy the whole state, for `restore_snapshot`; the buffers are allocated once."""
        tensors = list(self.state_tensors().values())
        if not self._undo:
            self._undo = [torch.empty_like(tensor) for tensor in tensors]
        if tensors:
            torch._foreach_copy_(self._undo, tensors)
        self._undo_steps = self.num_steps

    @torch.no_grad()
    def restore_snapshot(self) -> None:
        """Go back to the last snapshot, bit for bit; it stays usable."""
        if self._undo_steps is None:
            raise TrainingError("optimizer: no snapshot to go back to; take one before the step")
        if self._undo:
            torch._foreach_copy_(list(self.state_tensors().values()), self._undo)
        self._set_num_steps(self._undo_steps)

    def can_undo(self, step: int) -> bool:
        """Whether the last snapshot is of right before step number `step`, which was the last one."""
        return self._undo_steps == step == self.num_steps - 1

    def _forget_other_past(self, num_steps: int) -> None:
        """Let go of the snapshot where a state of another step is loaded: it does not lead there."""
        if num_steps != self.num_steps:
            self._undo_steps = None

    def undo_state(self) -> dict[str, torch.Tensor]:
        """The tensors of the last snapshot, named as `state` names them; not copies, so read them only."""
        if self._undo_steps is None:
            raise TrainingError("optimizer: no snapshot to look at; take one before the step")
        return dict(zip(self.state_tensors(), self._undo, strict=True))

    def _new_moments(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if self._in_bytes:
            return new_moments(weight)
        return {name: torch.zeros_like(weight, requires_grad=False) for name in OPTIMIZERS[self._config.kind].names}

    def _set_num_steps(self, num_steps: int) -> None:
        self.num_steps = num_steps
        for step in self._steps:
            step.fill_(self._num_updates)

    @property
    def _num_updates(self) -> int:
        return self.num_steps if self._renewed_every is None else self.num_steps % self._renewed_every

    def _ordered_gradients(self, gradients: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        if set(gradients) != set(self._names):
            missing, unknown = (
                sorted(set(self._names) - set(gradients)),
                sorted(set(gradients) - set(self._names)),
            )
            raise TrainingError(
                f"optimizer: no gradient for {missing[:3]}, gradient for unknown {unknown[:3]}; "
                "give exactly one for each parameter, zeros for an unused one"
            )
        for name, weight in zip(self._names, self._weights, strict=True):
            mismatch = _describe_mismatch(gradients[name], weight)
            if mismatch:
                raise TrainingError(f"optimizer: gradient of {name}: {mismatch}")
        return [gradients[name].detach() for name in self._names]

    def _scale_gradients(self, gradients: list[torch.Tensor], coefficient: float) -> list[torch.Tensor]:
        if coefficient == 1.0:
            return gradients
        if not self._scaled:
            self._scaled = [torch.empty_like(weight, requires_grad=False) for weight in self._weights]
        for buffer, gradient in zip(self._scaled, gradients, strict=True):
            torch.mul(gradient, coefficient, out=buffer)
        return self._scaled


def expect_state(tensors: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], num_steps: int) -> None:
    """Refuse a state that is not like the one of an optimizer.

    Args:
        own: State of the optimizer, by the same names.
        num_steps: Steps that were made to get there.
    """
    if set(tensors) != set(own):
        missing, unknown = sorted(set(own) - set(tensors)), sorted(set(tensors) - set(own))
        raise CheckpointError(
            f"optimizer state: missing {missing[:3]}, unknown {unknown[:3]}; it is from another stage or model"
        )
    if num_steps < 0:
        raise CheckpointError(f"optimizer state: {num_steps} steps, expected at least 0")
    for name, mine in own.items():
        mismatch = _describe_mismatch(tensors[name], mine)
        if mismatch:
            raise CheckpointError(f"optimizer state: {name}: {mismatch}; it is from another stage or model")


def _describe_mismatch(tensor: torch.Tensor, expected: torch.Tensor) -> str | None:
    if tensor.shape == expected.shape and tensor.dtype == expected.dtype:
        return None
    return f"found {tensor.dtype} {list(tensor.shape)}, expected {expected.dtype} {list(expected.shape)}"


# as in torch.nn.utils.clip_grad_norm_
_EPS = 1e-6


def gradient_norm_squared(gradients: Mapping[str, torch.Tensor], *, exact: bool = False) -> float:
    """Squared Euclidean norm of one stage's gradient; the sum over all stages is that of the whole gradient.

    Norms per tensor in float32 (of float64, in that), squared and added in float64 in the order of the names, so two
    holders of the same gradient get the same number; with `exact` on any two processors. NaN or infinity when the
    gradient holds one.
    """
    total = 0.0
    for name in sorted(gradients):
        gradient = gradients[name].detach()
        wider = torch.promote_types(gradient.dtype, torch.float32)
        norm = float(compute_norm(gradient) if exact else torch.linalg.vector_norm(gradient, dtype=wider))
        total += norm * norm
    return total


def norm_of_squares(squares: Sequence[float | None]) -> float:
    """Return the norm of a whole gradient from the squared norms of its parts, added up in this order.

    Returns:
        NaN where a part's is None, which says that it is not finite.
    """
    finite = [square for square in squares if square is not None]
    return math.sqrt(math.fsum(finite)) if len(finite) == len(squares) else math.nan


def clip_coefficient(total_norm: float, clip_norm: float | None) -> float:
    """Return the factor of every gradient, at most 1, so that the whole norm is at most `clip_norm`.

    Raises:
        NonFiniteLossError: The norm is NaN, infinite or negative, whether clipping is on or not.
    """
    if not (math.isfinite(total_norm) and total_norm >= 0.0):
        raise NonFiniteLossError(
            f"gradient norm is {total_norm}; nothing was updated; lower optimizer.lr, or use train.precision='fp32'"
        )
    if clip_norm is None:
        return 1.0
    return min(1.0, clip_norm / (total_norm + _EPS))
