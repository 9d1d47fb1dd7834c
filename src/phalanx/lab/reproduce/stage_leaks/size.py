"""The two pipelines that are attacked, the ways in which they are trained, and the sizes of the measurement."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

Regime = Literal["scratch", "full", "lora"]
SMALL, REAL = "gpt2-small", "smollm2-135m"
RANK = 8


@dataclass(frozen=True)
class PipelineSize:
    """One model in six stages, of which the first and the last are the owner's.

    Attributes:
        layers: Number of blocks of each stage, in order.
        length: Number of tokens of a sequence of text.
        rates: Learning rate for each way of training.
        owned: Sequences of the owner's text that are trained on.
        held_out: Further sequences of the owner's text, for the loss.
        known: Sequences that the attackers learn from.
        attacked: The first of the owner's text, which the attackers recover.
        searched: The first of those, on which the two searches are tried.
        labelled: Texts of each kind that are known with their property, and as many that are attacked.
        inverter_steps: Training steps of `trained_inverter`.
        search_steps: Steps of `gradient_search`.
        candidates: Tokens in the table of the nearest neighbour.
        openings: Tokens for which the states as a first token are made.
        widths: Numbers of proposals that the candidate search tries; empty leaves that attack out.
    """

    layers: tuple[int, ...]
    length: int
    rows: int
    microbatches: int
    steps: int
    rates: Mapping[Regime, float]
    owned: int
    held_out: int
    known: int
    attacked: int
    searched: int
    labelled: int
    inverter_steps: int
    search_steps: int
    candidates: int
    openings: int
    widths: tuple[int, ...]

    @property
    def middle_stages(self) -> range:
        """The stages of other parties."""
        return range(1, len(self.layers) - 1)

    def first_layer(self, stage: int) -> int:
        """The first block of a stage."""
        return sum(self.layers[:stage])


@dataclass(frozen=True)
class StageLeakSize:
    """The sizes of a measurement, which --quick makes smaller."""

    pipelines: Mapping[str, PipelineSize]
    regimes: Mapping[str, tuple[Regime, ...]]
    noises: Mapping[str, tuple[float, ...]]
    seeds: Mapping[str, tuple[int, ...]]


_SMALL = PipelineSize(
    layers=(1, 1, 1, 1, 1, 1),
    length=48,
    rows=8,
    microbatches=2,
    steps=160,
    rates=MappingProxyType({"scratch": 1e-3, "full": 5e-4, "lora": 2e-3}),
    owned=768,
    held_out=48,
    known=160,
    attacked=24,
    searched=4,
    labelled=24,
    inverter_steps=60,
    search_steps=80,
    candidates=512,
    openings=2048,
    widths=(16,),
)
_REAL = PipelineSize(
    layers=(1, 7, 7, 7, 7, 1),
    length=32,
    rows=4,
    microbatches=2,
    steps=4,
    rates=MappingProxyType({"full": 2e-5, "lora": 2e-4}),
    owned=64,
    held_out=16,
    known=112,
    attacked=12,
    searched=2,
    labelled=16,
    inverter_steps=30,
    search_steps=60,
    candidates=128,
    openings=0,
    # what it wins at these depths is known from the split: docs/leaks.md
    widths=(),
)
_LEVELS = (0.3, 1.0, 3.0)

SIZES: Mapping[str, StageLeakSize] = MappingProxyType(
    {
        "full": StageLeakSize(
            pipelines=MappingProxyType({SMALL: _SMALL, REAL: _REAL}),
            regimes=MappingProxyType({SMALL: ("scratch", "full", "lora"), REAL: ("lora", "full")}),
            noises=MappingProxyType({SMALL: _LEVELS, REAL: (1.0,)}),
            seeds=MappingProxyType({SMALL: (0, 1, 2), REAL: (0,)}),
        ),
        "quick": StageLeakSize(
            pipelines=MappingProxyType({SMALL: _SMALL}),
            regimes=MappingProxyType({SMALL: ("full",)}),
            noises=MappingProxyType({SMALL: (1.0,)}),
            seeds=MappingProxyType({SMALL: (0,)}),
        ),
    }
)


def describe_pipeline(size: PipelineSize) -> dict[str, Any]:
    """Everything about a pipeline that decides a figure and is not in its row."""
    return {
        **vars(size),
        "layers": list(size.layers),
        "widths": list(size.widths),
        "rates": dict(size.rates),
        "rank": RANK,
    }
