"""Splits that depend on the texts and a seed only: not on the order of a file, nor on the version of a library."""

import hashlib
import math
from collections.abc import Sequence

from phalanx.data.tasks.task import Example
from phalanx.errors import DataError


def split_by_class(
    examples: Sequence[Example], test_share: float, seed: int
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Split into training and test examples, each class in the same proportion.

    Args:
        examples: Each text once.
        test_share: Of every class, rounded to the nearest number; at least one example stays on either side.
        seed: Another one gives another split.

    Returns:
        Training and test examples, each in an order that shows nothing of the class.

    Raises:
        DataError: A class has fewer than two examples.
    """
    train: list[Example] = []
    test: list[Example] = []
    for label, members in _by_class(examples, seed):
        if len(members) < 2:
            raise DataError(f"class {label}: has {len(members)} example; a split needs two of every class")
        held_out = min(max(1, round(test_share * len(members))), len(members) - 1)
        test += members[:held_out]
        train += members[held_out:]
    return _shuffled(train, seed), _shuffled(test, seed)


def take_by_class(examples: Sequence[Example], count: int, seed: int) -> tuple[Example, ...]:
    """Draw `count` examples in which every class has its share of the whole, and at least one.

    Fewer are drawn only if there are fewer. Largest remainders first, so that the counts add up.

    Raises:
        DataError: `count` is below the number of classes.
    """
    groups = _by_class(examples, seed)
    if count >= len(examples):
        return _shuffled(examples, seed)
    if count < len(groups):
        raise DataError(f"{count} examples for {len(groups)} classes; take at least one of each")
    shares = {label: count * len(members) / len(examples) for label, members in groups}
    sizes = {label: max(1, math.floor(share)) for label, share in shares.items()}
    by_remainder = sorted(sizes, key=lambda label: (sizes[label] - shares[label], label))
    for label in by_remainder[: max(0, count - sum(sizes.values()))]:
        sizes[label] += 1
    while sum(sizes.values()) > count:
        sizes[max(sizes, key=lambda label: (sizes[label], label))] -= 1
    return _shuffled([one for label, members in groups for one in members[: sizes[label]]], seed)


def balanced(examples: Sequence[Example], per_class: int, seed: int) -> tuple[Example, ...]:
    """Draw at most `per_class` examples of every class."""
    return _shuffled([one for _, members in _by_class(examples, seed) for one in members[:per_class]], seed)


def _by_class(examples: Sequence[Example], seed: int) -> list[tuple[int, list[Example]]]:
    groups: dict[int, list[Example]] = {}
    for example in _shuffled(examples, seed):
        groups.setdefault(example.label, []).append(example)
    return sorted(groups.items())


def _shuffled(examples: Sequence[Example], seed: int) -> tuple[Example, ...]:
    return tuple(sorted(examples, key=lambda example: _rank(example.text, seed)))


def _rank(text: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}|".encode() + text.encode("utf-8", "surrogatepass")).digest()
