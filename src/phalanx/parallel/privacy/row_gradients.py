"""The clipped sum of the gradients of single rows, by the hooks of Opacus.

"hooks" keeps the gradient of each row of a microbatch. "ghost" computes their norms alone, from what went into and came
back to each layer. Where linear layers alone are trained, the sum follows from the same two with each row weighed down
by its norm (Bu et al. 2023, book-keeping); elsewhere the backward pass runs once more with rows' losses weighed down.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from phalanx.config import printable_text
from phalanx.errors import ConfigError, TrainingError
from phalanx.security.privacy import PrivacyConfig

_TOLERANCE = 1e-3
_CHECKED_SUMS = 2
_LONG = 200


class RowLosses(Protocol):
    """The loss of each row of some rows."""

    def __call__(self, numbers: Tensor) -> Tensor:
        """Run the model on rows by number, and return one loss a row."""


class RowGradients:
    """The trained parameters of a module, with the gradient of each row for itself.

    Args:
        module: Called with rows first, and so is every layer inside it that is trained.
        settings: Clipping of norms, and their computation.

    Guarantees:
        The sum moves by at most `clip_norm` when one row is left out, up to rounding in float32: a row with a gradient
        that is not finite counts for nothing. Before the first two sums, norms are compared with the norms of rows that
        are run alone; this detects a layer that mixes rows, or is used in several places.
    """

    def __init__(self, module: nn.Module, settings: PrivacyConfig) -> None:
        self._clip, self._ghost = settings.clip_norm, settings.clipping == "ghost"
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._hooks = _hook_module(module, settings)
        self._linear = _LinearCapture(self._hooks) if self._ghost else None
        self._module, self._num_sums, self._is_due = module, 0, True

    def add_rows(self, losses: RowLosses, rows: Tensor, total: list[Tensor]) -> Tensor:
        """Add the clipped gradients of some rows to a total, one tensor a parameter; return the rows' losses.

        Args:
            losses: Function that runs the model and returns losses of rows.
            total: Total from `zeros`.
        """
        if self._is_due and len(rows):
            self._check_norms(losses, rows)
        row_losses, norms = self._run_rows(losses, rows, total)
        if not bool(norms.isfinite().all()):
            # once more without those: what they touch is not finite either
            finite_rows = rows[norms.isfinite()]
            if len(finite_rows) == len(rows):
                raise TrainingError("privacy: norms are not finite for rows that have finite ones")
            return self.add_rows(losses, finite_rows, total) if len(finite_rows) else row_losses[:0]
        return row_losses

    def zero_total(self) -> list[Tensor]:
        """Return a total of nothing."""
        return [torch.zeros_like(parameter) for parameter in self._parameters]

    def set_gradients(self, total: list[Tensor]) -> None:
        """Put a total into the parameters' gradients."""
        for parameter, gradient in zip(self._parameters, total, strict=True):
            parameter.grad = gradient
        self._num_sums += 1
        # the gradient of a low-rank adapter's first matrix is zero until its second one has moved
        self._is_due = self._num_sums < _CHECKED_SUMS

    def _run_rows(self, losses: RowLosses, rows: Tensor, total: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return losses and norms; add to the total where all norms are finite."""
        try:
            if self._linear is None:
                return self._run_with_hooks(losses, rows, total)
            return self._run_with_ghost_norms(self._linear, losses, rows, total)
        finally:
            if self._linear is not None:
                self._linear.captured.clear()
            for parameter in self._parameters:
                parameter.grad = None
                parameter.grad_sample = None  # type: ignore[attr-defined]

    def _run_with_hooks(self, losses: RowLosses, rows: Tensor, total: list[Tensor]) -> tuple[Tensor, Tensor]:
        row_losses = losses(rows)
        _run_backward(row_losses.sum())
        gradients = [parameter.grad_sample for parameter in self._parameters]  # type: ignore[attr-defined]
        for gradient in gradients:
            _check_rows(gradient, len(rows))
        norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
        if bool(norms.isfinite().all()):
            for place, gradient in zip(total, gradients, strict=True):
                place.add_(torch.einsum("r,r...->...", self._clip_weights(norms), gradient))
        return row_losses.detach(), norms

    def _run_with_ghost_norms(
        self, linear: "_LinearCapture", losses: RowLosses, rows: Tensor, total: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        row_losses = losses(rows)
        _run_backward(row_losses.sum(), again=not linear.holds_all(self._parameters))
        parts = [parameter._norm_sample for parameter in self._parameters]  # type: ignore[attr-defined]
        for part in parts:
            _check_rows(part, len(rows))
        norms = torch.stack(parts).norm(dim=0)
        if not bool(norms.isfinite().all()):
            return row_losses.detach(), norms
        weights = self._clip_weights(norms)
        if linear.holds_all(self._parameters):
            for place, parameter in zip(total, self._parameters, strict=True):
                place.add_(linear.weighted_sum(parameter, weights))
            return row_losses.detach(), norms
        for parameter in self._parameters:
            parameter.grad = None
        self._hooks.disable_hooks()
        _run_backward((weights * row_losses).sum())
        self._hooks.enable_hooks()
        for place, parameter in zip(total, self._parameters, strict=True):
            if parameter.grad is not None:
                place.add_(parameter.grad)
        return row_losses.detach(), norms

    def _clip_weights(self, norms: Tensor) -> Tensor:
        return (self._clip / (norms + 1e-6)).clamp(max=1.0)

    def _check_norms(self, losses: RowLosses, rows: Tensor) -> None:
        """Compare norms with the norms of single rows that are run without hooks, and nothing dropped."""
        drops = [layer for layer in self._module.modules() if isinstance(layer, nn.Dropout) and layer.training]
        for layer in drops:
            layer.eval()
        try:
            _, norms = self._run_rows(losses, rows[:2], self.zero_total())
        except (NotImplementedError, ValueError, AttributeError, IndexError, RuntimeError) as exc:
            raise _inseparable_rows_error(printable_text(str(exc), _LONG)) from exc
        self._hooks.disable_hooks()
        for number, norm in zip(rows[:2], norms, strict=True):
            row_loss = losses(number[None])
            with _silence_warnings():
                gradients = torch.autograd.grad(row_loss.sum(), self._parameters, allow_unused=True)
            alone = torch.stack([gradient.norm() for gradient in gradients if gradient is not None]).norm()
            if bool(alone.isfinite()) and abs(float(norm - alone)) > _TOLERANCE * float(alone) + 1e-9:
                raise _inseparable_rows_error(
                    f"a row has the norm {float(norm):.6g}, and {float(alone):.6g} when it is alone"
                )
        self._hooks.enable_hooks()
        for layer in drops:
            layer.train()
        self._is_due = False


class _LinearCapture:
    """Inputs and gradients of each linear layer in one backward pass, for the sum of weighed rows.

    Args:
        hooks: Hooks of Opacus; its function for the norms of linear layers is given these tensors.
    """

    def __init__(self, hooks: Any) -> None:
        self.captured: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        norms_of = hooks.NORM_SAMPLERS[nn.Linear]
        self._trained = {
            parameter
            for layer in hooks.modules()
            if type(layer) is nn.Linear
            for parameter in layer.parameters(recurse=False)
        }

        def noted(layer: nn.Linear, inputs: list[Tensor], back: Tensor) -> Any:
            for parameter in layer.parameters(recurse=False):
                if parameter.requires_grad:
                    self.captured[parameter] = (inputs[0].to(back.dtype), back)
            return norms_of(layer, inputs, back)

        hooks.NORM_SAMPLERS = {**hooks.NORM_SAMPLERS, nn.Linear: noted}

    def holds_all(self, parameters: list[nn.Parameter]) -> bool:
        """Whether every parameter is of a linear layer."""
        return self._trained.issuperset(parameters)

    def weighted_sum(self, parameter: nn.Parameter, weights: Tensor) -> Tensor:
        """Return the sum of a parameter's gradients over rows, each times its weight."""
        inputs, back = self.captured[parameter]
        back = (back * weights.view(-1, *[1] * (back.dim() - 1))).flatten(0, -2)
        return back.sum(0) if parameter.dim() == 1 else back.T @ inputs.flatten(0, -2)


def _hook_module(module: nn.Module, settings: PrivacyConfig) -> Any:
    try:
        from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping  # noqa: PLC0415
    except ImportError as exc:
        raise ConfigError(
            "[privacy] needs opacus, which is not installed; install phalanx-train[dp], or remove the section"
        ) from exc
    kind: Callable[..., Any] = (
        GradSampleModuleFastGradientClipping if settings.clipping == "ghost" else GradSampleModule
    )
    try:
        return kind(module, batch_first=True, loss_reduction="sum", strict=True)
    except NotImplementedError as exc:
        raise ConfigError(f"privacy: Opacus cannot hook this model ({exc}); train an adapter alone") from exc


def _run_backward(loss: Tensor, *, again: bool = False) -> None:
    with _silence_warnings():
        loss.backward(retain_graph=again)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _silence_warnings() -> Iterator[None]:
    """Say nothing of hooks on layers that take ids: those have no gradients."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        yield


def _check_rows(found: Any, rows: int) -> None:
    if not isinstance(found, Tensor) or len(found) != rows:
        raise _inseparable_rows_error("a layer is used several times, or is not called with a row for each row")


def _inseparable_rows_error(why: str) -> ConfigError:
    return ConfigError(
        f"privacy: gradients of single rows of this model cannot be told apart ({why}); take privacy.clipping = "
        '"hooks", or model.adapter.kind = "lora"'
    )
