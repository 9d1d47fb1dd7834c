"""An objective of the user's own: ``train.objective = "file.py:function"``."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from phalanx.config import unfit_code_error, users_traceback
from phalanx.errors import PhalanxError, TrainingError
from phalanx.objectives.objective import Objective

if TYPE_CHECKING:
    from torch import Tensor

_EXPECTED = "a function of logits and labels that returns the summed loss, a tensor of one number, and its targets"


def own_objective(kind: str, function: Any) -> Objective:
    """Make an objective of a function ``(logits, labels) -> (loss, targets)``."""
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError) as exc:
        description = f"a {type(function).__name__}" + (f" ({exc})" if callable(function) else "")
        raise unfit_code_error(kind, description, _EXPECTED) from exc

    def loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        try:
            result = function(logits, labels)
        except PhalanxError:
            raise
        except Exception as exc:
            # whatever the user's code raises
            raise TrainingError(f"train.objective, {kind}: failed:\n{users_traceback(exc)}") from exc
        return _check_loss(kind, result, logits)

    return Objective(loss)


def _check_loss(kind: str, loss: Any, logits: Tensor) -> tuple[Tensor, int]:
    if not isinstance(loss, tuple) or len(loss) != 2:
        raise unfit_code_error(kind, f"a {type(loss).__name__} from the function", _EXPECTED)
    total, targets = loss
    follows = getattr(total, "requires_grad", False) or not logits.requires_grad
    if getattr(total, "shape", None) != () or not follows:
        raise unfit_code_error(
            kind, f"a {_describe_value(total)} as the loss", "a tensor of one number that follows from the logits"
        )
    if type(targets) is not int or targets < 0:
        raise unfit_code_error(kind, f"{targets!r:.80} as the number of targets", "an integer of at least 0")
    return total.float(), targets


def _describe_value(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} {list(shape)}"
