"""The table of optimizers: what each is told, and what it keeps; ranks, configs and planner read it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Shape = tuple[int, ...]
_MANY = 1 << 15
_NUMBER_BYTES = 4


@dataclass(frozen=True)
class OptimizerFacts:
    """One line of the table.

    Attributes:
        torch_class: Its class in ``torch.optim``.
        settings: Keys of ``[optimizer]`` that it is told, under torch's names; those of others mean nothing to it.
        names: Of all that it keeps, for some parameter or other.
        moments: What it keeps for a parameter of some shape, in fp32.
        fused: Where torch has one kernel for a step: for all parameters, for those that no copies share, or nowhere.
        counts_steps: Whether it keeps the number of its steps beside that.
    """

    torch_class: str
    settings: tuple[str, ...]
    names: tuple[str, ...]
    moments: Callable[[Shape], dict[str, Shape]]
    fused: Literal["always", "unshared", "never"] = "always"
    counts_steps: bool = True

    @property
    def bytes_per_parameter(self) -> int:
        """Of a large matrix, where a row and a column count nothing."""
        kept = self.moments((_MANY, _MANY)).values()
        return _NUMBER_BYTES * sum(rows * columns for rows, columns in kept) // _MANY**2


def _whole(*names: str) -> Callable[[Shape], dict[str, Shape]]:
    return lambda shape: dict.fromkeys(names, shape)


def _factored(shape: Shape) -> dict[str, Shape]:
    """A row and a column in the place of a matrix. Source: Shazeer and Stern 2018 (Adafactor), section 3."""
    if len(shape) < 2:
        return {"variance": shape}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


OPTIMIZERS: dict[str, OptimizerFacts] = {
    "adamw": OptimizerFacts(
        torch_class="AdamW",
        settings=("lr", "betas", "eps"),
        names=("exp_avg", "exp_avg_sq"),
        moments=_whole("exp_avg", "exp_avg_sq"),
    ),
    "sgd": OptimizerFacts(
        torch_class="SGD",
        settings=("lr", "momentum"),
        names=("momentum_buffer",),
        moments=_whole("momentum_buffer"),
        # torch's fused kernel has no rule for tensors that copies share
        fused="unshared",
        counts_steps=False,
    ),
    "adafactor": OptimizerFacts(
        torch_class="Adafactor",
        settings=("lr",),
        names=("row_var", "col_var", "variance"),
        moments=_factored,
        fused="never",
    ),
}


def moment_names(kind: str) -> tuple[str, ...]:
    """Names of all that an optimizer keeps, for some parameter or other."""
    return OPTIMIZERS[kind].names


def moment_shapes(kind: str, shape: Sequence[int]) -> dict[str, Shape]:
    """What an optimizer keeps for a parameter.

    Args:
        kind: As in ``[optimizer]``.
        shape: Of the whole parameter.
    """
    return OPTIMIZERS[kind].moments(tuple(shape))


def foreign_settings(kind: str) -> tuple[str, ...]:
    """Keys of ``[optimizer]`` that are told to other optimizers and mean nothing to this one."""
    every = dict.fromkeys(name for line in OPTIMIZERS.values() for name in line.settings)
    return tuple(name for name in every if name not in OPTIMIZERS[kind].settings)
