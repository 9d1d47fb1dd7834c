"""The table of optimizers: their settings and their state; ranks, configs and planner read it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Shape = tuple[int, ...]
_MANY = 1 << 15
_NUMBER_BYTES = 4
_SCALED, _FEWEST_SCALED = 256, 4096
"""Numbers of 8-bit moments that share a scale, and how many a tensor has at least to be worth it."""


@dataclass(frozen=True)
class OptimizerFacts:
    """One line of the table.

    Attributes:
        torch_class: Its class in ``torch.optim``; in `phalanx.optimizers.few_bits` where torch has none.
        settings: Keys of ``[optimizer]`` that reach it, under torch's names; other keys have no effect.
        names: Names of all state tensors, for any parameter.
        moments: Returns the state's shapes for a parameter of some shape, in fp32 but for the names in `in_bytes`.
        fused: Whether torch has one kernel for a step: for all parameters, for the ones that no copies share, or
            nowhere.
        counts_steps: Whether it keeps the number of its steps beside that.
        in_bytes: Names of state tensors that take one byte a number.
        is_whole: Whether its state is of whole tensors, and of no use to ranks that have slices.
    """

    torch_class: str
    settings: tuple[str, ...]
    names: tuple[str, ...]
    moments: Callable[[Shape], dict[str, Shape]]
    fused: Literal["always", "unshared", "never"] = "always"
    counts_steps: bool = True
    in_bytes: tuple[str, ...] = ()
    is_whole: bool = False

    @property
    def bytes_per_parameter(self) -> int:
        """Of a large matrix, where a row, a column and a scale of many numbers count nothing."""
        state = self.moments((_MANY, _MANY)).items()
        return (
            sum((1 if name in self.in_bytes else _NUMBER_BYTES) * math.prod(shape) for name, shape in state) // _MANY**2
        )


def _whole_moments(*names: str) -> Callable[[Shape], dict[str, Shape]]:
    return lambda shape: dict.fromkeys(names, shape)


def _factored_moments(shape: Shape) -> dict[str, Shape]:
    """A row and a column in the place of a matrix. Source: Shazeer and Stern 2018 (Adafactor), section 3."""
    if len(shape) < 2:
        return {"variance": shape}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


def _in_bytes(shape: Shape) -> dict[str, Shape]:
    """Two bytes in the place of two numbers, with scales. Source: Dettmers et al. 2022, section 2."""
    numbers = math.prod(shape)
    if numbers < _FEWEST_SCALED:
        return {"exp_avg": shape, "exp_avg_sq": shape}
    scales = (-(-numbers // _SCALED),)
    return {"exp_avg_8bit": shape, "exp_avg_sq_8bit": shape, "exp_avg_scale": scales, "exp_avg_sq_scale": scales}


OPTIMIZERS: dict[str, OptimizerFacts] = {
    "adamw": OptimizerFacts(
        torch_class="AdamW",
        settings=("lr", "betas", "eps"),
        names=("exp_avg", "exp_avg_sq"),
        moments=_whole_moments("exp_avg", "exp_avg_sq"),
    ),
    "sgd": OptimizerFacts(
        torch_class="SGD",
        settings=("lr", "momentum"),
        names=("momentum_buffer",),
        moments=_whole_moments("momentum_buffer"),
        # torch's fused kernel has no rule for tensors that copies share
        fused="unshared",
        counts_steps=False,
    ),
    "adafactor": OptimizerFacts(
        torch_class="Adafactor",
        settings=("lr",),
        names=("row_var", "col_var", "variance"),
        moments=_factored_moments,
        fused="never",
        is_whole=True,
    ),
    "adamw8bit": OptimizerFacts(
        torch_class="AdamW8bit",
        settings=("lr", "betas", "eps"),
        names=("exp_avg", "exp_avg_sq", "exp_avg_8bit", "exp_avg_sq_8bit", "exp_avg_scale", "exp_avg_sq_scale"),
        moments=_in_bytes,
        fused="never",
        in_bytes=("exp_avg_8bit", "exp_avg_sq_8bit"),
        is_whole=True,
    ),
}


def moment_names(kind: str) -> tuple[str, ...]:
    """Names of all that an optimizer keeps, for some parameter or other."""
    return OPTIMIZERS[kind].names


def moment_shapes(kind: str, shape: Sequence[int]) -> dict[str, Shape]:
    """Return the shapes of an optimizer's state for a parameter."""
    return OPTIMIZERS[kind].moments(tuple(shape))


def is_in_bytes(name: str) -> bool:
    """Tell whether an optimizer stores the state of this name in a byte a number; all else is float32."""
    return any(name in facts.in_bytes for facts in OPTIMIZERS.values())


def foreign_settings(kind: str) -> tuple[str, ...]:
    """Keys of ``[optimizer]`` that are told to other optimizers and mean nothing to this one."""
    every = dict.fromkeys(name for facts in OPTIMIZERS.values() for name in facts.settings)
    return tuple(name for name in every if name not in OPTIMIZERS[kind].settings)
