"""A question to the planner."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast, get_args

from phalanx.errors import ConfigError
from phalanx.planner.cluster.catalog import open_model_shape
from phalanx.planner.cluster.hardware import Cluster
from phalanx.planner.guard.finding import Verification
from phalanx.planner.layout import Layout, parse_layout
from phalanx.planner.model.recipe import Offload, Precision, Recipe
from phalanx.planner.model.shape import ModelShape
from phalanx.planner.search.candidates import in_islands
from phalanx.planner.search.rank import By

MAX_TOKENS = 1e18


@dataclass(frozen=True)
class Question:
    """The question that a plan answers.

    Attributes:
        model: Its name or path, for people.
        counts: Choices of the number of devices.
        tokens: Tokens of the training; None where it is not known.
        guard: Verification; None inside one trust domain.
        by: Measure by which layouts are ranked.
        fixed: The only layout to judge; None judges all.
        own: The run file's layout, which is judged as well; None where it has none.
    """

    model: str
    shape: ModelShape
    recipe: Recipe
    cluster: Cluster
    counts: tuple[int, ...]
    tokens: float | None = None
    guard: Verification | None = None
    by: By = "speed"
    fixed: Layout | None = None
    own: Layout | None = None

    def with_options(self, *, layout: str | None, by: str, gpus: Sequence[int], tokens: float | None) -> "Question":
        """Return the same question, narrowed.

        Args:
            layout: The only one to judge, such as ``dp=2,tp=2``; its ranks are then the devices. None judges all.
            by: Measure by which layouts are ranked.
            gpus: Choices of the number of devices; an empty sequence changes nothing.
            tokens: Tokens of the training; None changes nothing.
        """
        if by not in get_args(By):
            raise ConfigError(f"--by {by}: choices: {', '.join(get_args(By))}")
        if tokens is not None and not 0 < tokens < MAX_TOKENS:
            raise ConfigError(f"--tokens {tokens:g}: expected a number above 0 and below {MAX_TOKENS:g}")
        fixed = None if layout is None else parse_layout(layout)
        if fixed is not None and fixed.islands == 1:
            fixed = in_islands(fixed, self.recipe.outer)
        counts = tuple(gpus) or self.counts if fixed is None else (fixed.num_ranks,)
        if fixed is not None and set(gpus) - {fixed.num_ranks}:
            raise ConfigError(
                f"--layout {layout} has {fixed.num_ranks} ranks, not --gpus {max(gpus)}; leave --gpus out"
            )
        num_tokens = self.tokens if tokens is None else tokens
        return replace(self, by=cast(By, by), fixed=fixed, counts=counts, tokens=num_tokens)


def about_model(
    model: str, cluster: Cluster, sequences: int, sequence_length: int, precision: str, offload: str = "none"
) -> Question:
    """Return the question about a model's config, on all devices of a cluster.

    Args:
        model: A config.json, its directory, or a known model.
        precision: Precision of a `Recipe`.
        offload: Offloading of a `Recipe`.
    """
    if precision not in get_args(Precision):
        raise ConfigError(f"--precision {precision}: choices: {', '.join(get_args(Precision))}")
    if offload not in get_args(Offload):
        raise ConfigError(f"--offload {offload}: choices: {', '.join(get_args(Offload))}")
    if sequences < 1 or sequence_length < 1:
        raise ConfigError(f"--sequences {sequences} --sequence-length {sequence_length}: expected at least 1 of each")
    recipe = Recipe(sequences, sequence_length, precision=cast(Precision, precision), offload=cast(Offload, offload))
    return Question(model, open_model_shape(model), recipe, cluster, (cluster.num_devices,))
