"""What an optimizer keeps for each parameter, by name and shape; imports no torch."""

from collections.abc import Sequence

Shape = tuple[int, ...]

_NAMES = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "adafactor": ("row_var", "col_var", "variance"),
}


def moment_names(kind: str) -> tuple[str, ...]:
    """Names of all that an optimizer keeps, for some parameter or other."""
    return _NAMES[kind]


def moment_shapes(kind: str, shape: Sequence[int]) -> dict[str, Shape]:
    """What an optimizer keeps for a parameter of some shape.

    Args:
        kind: As in `OptimizerConfig`.
        shape: Of the whole parameter.

    Source: Shazeer and Stern 2018 (Adafactor): a row and a column in the place of a matrix.
    """
    own = tuple(shape)
    if kind != "adafactor":
        return dict.fromkeys(_NAMES[kind], own)
    if len(own) < 2:
        return {"variance": own}
    return {"row_var": (*own[:-1], 1), "col_var": (*own[:-2], 1, own[-1])}
