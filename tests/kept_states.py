"""What a run has kept of a step, by name, and how near that of ranks is to that of one process."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpoint import open_checkpoint
from phalanx.security.crypto import load_identity

WITHIN = 1e-6
"""Of ranks, from one process: relative or absolute, whichever is more."""
DIVIDED = 1e-4
"""Of weights after ten steps of AdamW at 1e-2, where rounding was divided by itself; 5.2e-5 is the most seen."""
ROUNDING = 1e-9
"""Root mean square of gradients that are nothing but rounding: those of biases of keys here are below 2e-11."""
PLAIN_EPS = "optimizer.eps=1e-3"
"""AdamW that divides by no less than this: what rounding adds to a gradient moves no weight by 1e-6, and every moment,
bias correction and decay is that of AdamW."""
_FIRST_SHARE = 0.1
"""Of a gradient in the first moment after the first step."""


def kept_state(run: Path, step: int) -> dict[str, Tensor]:
    """Weights and moments behind a step, as the run's own checkpoint has them."""
    owner = load_identity(run / "pki" / "owner").public
    checkpoint = open_checkpoint(run / "checkpoints" / f"step-{step:08}", owner, run=None, config_digest=None)
    return {name: tensor for stage in checkpoint.stages for name, tensor in checkpoint.stage_tensors(stage).items()}


def assert_same_weights(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], within: float = WITHIN) -> None:
    """All weights of one state are near those of another one."""
    assert _names(found) == _names(expected)
    for name in _names(expected):
        _assert_near(found[f"weight/{name}"], expected[f"weight/{name}"], name, within)


def assert_same_first_step_of_adamw(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The gradients of the first step are near each other, and so are the weights that have a gradient.

    AdamW divides a gradient by its own size, so its first update of a gradient g is lr * g / (|g| + eps). What
    rounding adds to g, about 1e-8 here, moves that by less than 1e-6 where |g| is more than 1e-6. Where it is less a
    gradient may be nothing but rounding, as that of a bias of keys is, which no output depends on.
    """
    assert _names(found) == _names(expected)
    for name in _names(expected):
        gradient, own = (state[f"exp_avg/{name}"] / _FIRST_SHARE for state in (expected, found))
        _assert_near(own, gradient, f"gradient of {name}", WITHIN)
        has_one = gradient.abs() > WITHIN
        weight, other = (state[f"weight/{name}"] for state in (expected, found))
        _assert_near(other[has_one], weight[has_one], name, WITHIN)


def rounded_gradients(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By name of a weight, as a mask, the numbers of which no gradient was more than rounding."""
    return {name: state[f"exp_avg_sq/{name}"].sqrt() < ROUNDING for name in _names(state)}


def _names(state: Mapping[str, Tensor]) -> list[str]:
    return sorted(name.removeprefix("weight/") for name in state if name.startswith("weight/"))


def _assert_near(found: Tensor, expected: Tensor, name: str, within: float) -> None:
    torch.testing.assert_close(found, expected, rtol=within, atol=within, msg=lambda said: f"{name}: {said}")
