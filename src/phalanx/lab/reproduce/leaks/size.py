"""The sizes of the leak table's measurements."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

MODEL = "smollm2-135m"
SEQUENCE_LENGTH = 32


@dataclass(frozen=True)
class LeakSize:
    """The sizes of a leak measurement, which --quick makes smaller.

    Attributes:
        searched_sequences: The first of those, on which the candidate search is tried.
        candidates: Tokens in the table of the nearest neighbour behind blocks.
        openings: Tokens for which the states as a first token are made.
        batches: Numbers of tokens of the batches from which adapter gradients are taken.
    """

    depths: tuple[int, ...]
    public_sequences: int
    private_sequences: int
    searched_sequences: int
    steps: int
    candidates: int
    openings: int
    batches: tuple[int, ...]


SIZES: Mapping[str, LeakSize] = MappingProxyType(
    {
        "full": LeakSize(
            (0, 1, 2, 4, 8, 15, 22, 29), 320, 16, 4, steps=40, candidates=1024, openings=49152, batches=(4, 8, 12, 24)
        ),
        "quick": LeakSize((0, 1, 4, 15, 29), 256, 16, 2, steps=20, candidates=256, openings=2048, batches=(4, 12)),
    }
)


def describe_leak_size(size: LeakSize) -> dict[str, Any]:
    """Everything that decides a figure and is not in its row."""
    return {
        "model": MODEL,
        "sequence_length": SEQUENCE_LENGTH,
        "size": {**asdict(size), "depths": list(size.depths), "batches": list(size.batches)},
    }
