"""A layout: how the ranks of one domain share a training step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from phalanx.errors import ConfigError
from phalanx.planner.schedules import SCHEDULES

AXES = ("dp", "tp", "pp", "cp")
CONTEXTS = ("ulysses", "ring")
"""Ways to be context parallel."""


@dataclass(frozen=True)
class Layout:
    """One way to use ``world`` ranks.

    Attributes:
        dp: Data parallel: copies that see different sequences.
        tp: Tensor parallel: ranks that share every matrix product.
        pp: Pipeline parallel: ranks that each have some of the layers.
        cp: Context parallel: ranks that share every sequence.
        zero: State that data and context parallel ranks share instead of copying: 0 nothing, 1 optimizer state, 2
            gradients too, 3 parameters too.
        schedule: Order of a pipeline's microbatches; one of `SCHEDULES`.
        replicas: With zero 2 or 3, number of groups whose members share one copy among themselves; gradients are summed
            between groups once a step.
        islands: Parts into which data parallel copies are cut that step by themselves.
        chunks: Stages of each pipeline rank; None is the schedule's own number.
        context: Method by which context parallel ranks see the whole sequence; one of `CONTEXTS`.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    replicas: int = 1
    islands: int = 1
    chunks: int | None = None
    context: str = "ulysses"

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def num_partners(self) -> int:
        """Ranks that would hold equal copies and join their gradients in every step."""
        return self.dp * self.cp // self.islands

    @property
    def num_shards(self) -> int:
        """Ranks among which ZeRO shares."""
        return self.num_partners // self.replicas

    def axis_sizes(self) -> dict[str, int]:
        """Return the axes along which ranks count up, the nearest ones first; islands and groups are parts of dp."""
        inner = self.dp // (self.islands * self.replicas)
        parts = {"replica": self.replicas, "island": self.islands}
        return {"tp": self.tp, "cp": self.cp, "dp": inner, **parts, "pp": self.pp}

    @property
    def shares_late(self) -> bool:
        """Whether gradients that ZeRO 2 and 3 share are whole until a pipeline's last microbatch.

        Source: torch's ``PipelineStage`` (2.13), which puts the sharing of ``fully_shard`` off until then.
        """
        return self.pp > 1 and self.zero >= 2 and self.num_shards > 1

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages that one rank has, one behind the other round the pipeline; 1 without a pipeline."""
        if self.pp == 1:
            return 1
        if self.chunks is not None:
            return self.chunks
        return SCHEDULES[self.schedule].chunks if self.schedule in SCHEDULES else 1

    def parallel_section(self) -> dict[str, Any]:
        """Return the keys of a run file's ``[parallel]`` section."""
        return {name: getattr(self, name) for name in (*AXES, "context", "zero", "schedule")}

    def __str__(self) -> str:
        """Return the axes that are in use, such as ``dp=2 tp=4 zero=3``."""
        parts = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) != 1]
        parts += [f"context={self.context}"] if self.context != "ulysses" else []
        parts += [f"zero={self.zero}"] if self.zero else []
        parts += [f"replicas={self.replicas}"] if self.replicas != 1 else []
        parts += [f"islands={self.islands}"] if self.islands != 1 else []
        parts += [self.schedule] if self.pp != 1 else []
        parts += [f"chunks={self.chunks}"] if self.chunks is not None and self.pp != 1 else []
        return " ".join(parts) or "one rank"


def all_layouts(world: int, zeros: tuple[int, ...] = (0, 1, 2, 3)) -> Iterator[Layout]:
    """Yield every layout of `world` ranks; schedule and context are named only where they count."""
    for dp, tp, pp, cp in _ordered_factors(world, len(AXES)):
        for zero in zeros if dp * cp > 1 else (0,):
            for schedule in SCHEDULES if pp > 1 else ("1f1b",):
                for context in CONTEXTS if cp > 1 else ("ulysses",):
                    yield Layout(dp, tp, pp, cp, zero, schedule, context=context)


def parse_layout(text: str) -> Layout:
    """Read a layout such as ``dp=2,tp=2,zero=1``, ``pp=4,schedule=gpipe`` or ``cp=2,context=ring``."""
    numbers, names = {*AXES, "zero", "replicas", "islands", "chunks"}, {"schedule", "context"}
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = part.partition("=")
        if key not in numbers | names:
            choices = ", ".join([*sorted(numbers), *sorted(names)])
            raise ConfigError(f"layout {text!r}: unknown key {key!r}; choices: {choices}")
        if key in numbers and not value.isdecimal():
            raise ConfigError(f"layout {text!r}: {key}: found {value!r}; expected a whole number")
        values[key] = int(value) if key in numbers else value
    return Layout(**values)


def axis_distance(one: Layout, other: Layout) -> float:
    """Return the distance of two layouts: doublings along each axis; any other difference counts a half."""
    axes = math.fsum(abs(math.log2(getattr(one, axis) / getattr(other, axis))) for axis in AXES)
    others = [field.name for field in fields(Layout) if field.name not in AXES]
    return axes + 0.5 * len([name for name in others if getattr(one, name) != getattr(other, name)])


def _ordered_factors(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (number,)
        return
    for first in range(number, 0, -1):
        if number % first == 0:
            for rest in _ordered_factors(number // first, parts - 1):
                yield (first, *rest)
