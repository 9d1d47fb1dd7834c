"""The shares of a task's texts, held out and for each client: they depend on the texts and a seed only."""

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.data.tasks.task import Example, LabelledExamples
from phalanx.errors import DataError


def split_by_class(
    examples: Sequence[Example], test_share: float, seed: int
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Split into training and test examples, each class in the same proportion.

    Args:
        test_share: Share of every class, rounded to the nearest number; at least one example stays on either side.

    Returns:
        Training and test examples, each in an order that shows nothing of the class.
    """
    train: list[Example] = []
    test: list[Example] = []
    for label, members in _by_class(examples, seed):
        if len(members) < 2:
            raise DataError(f"class {label}: has {len(members)} example; a split needs two of every class")
        held_out = min(max(1, round(test_share * len(members))), len(members) - 1)
        test += members[:held_out]
        train += members[held_out:]
    return _shuffle_examples(train, seed), _shuffle_examples(test, seed)


def take_by_class(examples: Sequence[Example], count: int, seed: int) -> tuple[Example, ...]:
    """Draw `count` examples in which every class has its share of the whole, and at least one.

    Fewer are drawn only if there are fewer. Largest remainders first, so that the counts add up.
    """
    groups = _by_class(examples, seed)
    if count >= len(examples):
        return _shuffle_examples(examples, seed)
    if count < len(groups):
        raise DataError(f"{count} examples for {len(groups)} classes; use at least one of each")
    shares = {label: count * len(members) / len(examples) for label, members in groups}
    sizes = {label: max(1, math.floor(share)) for label, share in shares.items()}
    by_remainder = sorted(sizes, key=lambda label: (sizes[label] - shares[label], label))
    for label in by_remainder[: max(0, count - sum(sizes.values()))]:
        sizes[label] += 1
    while sum(sizes.values()) > count:
        sizes[max(sizes, key=lambda label: (sizes[label], label))] -= 1
    return _shuffle_examples([example for label, members in groups for example in members[: sizes[label]]], seed)


def balance_classes(examples: Sequence[Example], per_class: int, seed: int) -> tuple[Example, ...]:
    """Draw at most `per_class` examples of every class."""
    return _shuffle_examples(
        [example for _, members in _by_class(examples, seed) for example in members[:per_class]], seed
    )


def _by_class(examples: Sequence[Example], seed: int) -> list[tuple[int, list[Example]]]:
    groups: dict[int, list[Example]] = {}
    for example in _shuffle_examples(examples, seed):
        groups.setdefault(example.label, []).append(example)
    return sorted(groups.items())


def _shuffle_examples(examples: Sequence[Example], seed: int) -> tuple[Example, ...]:
    return tuple(sorted(examples, key=lambda example: _shuffle_key(example.text, seed)))


def _shuffle_key(text: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}|".encode() + text.encode("utf-8", "surrogatepass")).digest()


_ATTEMPTS = 1000


def dirichlet_clients(
    examples: Sequence[Example], num_clients: int, alpha: float, seed: int, *, at_least: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Share examples out so that each class has its own, uneven shares of the clients.

    Args:
        examples: At least ``num_clients * at_least``.
        alpha: Parameter of the symmetric Dirichlet distribution over clients, drawn anew for every class: far below 1
            each class lies with few clients, far above 1 all clients are alike.
        at_least: Examples of every client; a draw that gives one fewer is drawn again.

    Returns:
        Indices of each client's examples, ascending; each example is in exactly one.

    Source: Hsu et al. 2019, section 3 (shares by class; here each class is dealt out, so that sizes vary as well).
    """
    if num_clients < 2 or not 0 < alpha < float("inf") or at_least < 1:
        raise DataError(
            f"{num_clients} clients, alpha {alpha}, at least {at_least}: expected 2 or more, > 0, 1 or more"
        )
    generator = random.Random(f"phalanx clients {seed} {num_clients} {alpha!r}")  # noqa: S311 - a partition, no secret
    for _ in range(_ATTEMPTS):
        drawn = _draw_clients(examples, num_clients, alpha, generator)
        if min(len(client) for client in drawn) >= at_least:
            return drawn
    raise DataError(
        f"{len(examples)} examples: no draw in {_ATTEMPTS} gave each of {num_clients} clients {at_least}; "
        "raise alpha or take more examples"
    )


def silo_clients(examples: Sequence[Example], num_clients: int) -> tuple[tuple[int, ...], ...]:
    """Share examples out by their collector: a silo is never divided.

    The largest silo first, each to the client that has least so far.
    """
    silos: dict[str, list[int]] = {}
    for index, example in enumerate(examples):
        silos.setdefault(example.silo, []).append(index)
    if "" in silos or len(silos) < num_clients:
        raise DataError(f"{len(silos)} silos for {num_clients} clients; expected one or more each, and none unnamed")
    clients: list[list[int]] = [[] for _ in range(num_clients)]
    for _, members in sorted(silos.items(), key=lambda item: (-len(item[1]), item[0])):
        min(clients, key=len).extend(members)
    return tuple(tuple(sorted(client)) for client in clients)


def _draw_clients(
    examples: Sequence[Example], num_clients: int, alpha: float, generator: random.Random
) -> tuple[tuple[int, ...], ...]:
    clients: list[list[int]] = [[] for _ in range(num_clients)]
    for label in sorted({example.label for example in examples}):
        members = [index for index, example in enumerate(examples) if example.label == label]
        generator.shuffle(members)
        weights = [generator.gammavariate(alpha, 1.0) for _ in range(num_clients)]
        # a draw so far below 1 that every weight is rounded to nothing leaves the class to any client
        total = sum(weights) or float(num_clients)
        shares = [weight / total for weight in weights] if sum(weights) else [1 / num_clients] * num_clients
        begin, reached = 0, 0.0
        for client, share in zip(clients, shares, strict=True):
            reached += share
            stop = len(members) if client is clients[-1] else round(reached * len(members))
            client.extend(members[begin:stop])
            begin = max(begin, stop)
    return tuple(tuple(sorted(client)) for client in clients)


TEST_SHARE = 0.2
"""Of every class, from which the held-out texts are drawn."""
SPLIT_SEED = 0
"""Seed of the held-out split: the same for every seed of a run."""


@dataclass(frozen=True)
class ClientShares:
    """A task's texts, dealt out."""

    clients: tuple[tuple[Example, ...], ...]
    test: tuple[Example, ...]

    @property
    def train_examples(self) -> tuple[Example, ...]:
        """All training texts, client by client."""
        return tuple(example for examples in self.clients for example in examples)


def share_out(task: LabelledExamples, num_clients: int, each: int, test: int, alpha: float, seed: int) -> ClientShares:
    """Share a task's texts out to clients that do not all see the same classes.

    By silo where the texts name their collector, else by class. Clients have the same number of texts, for they take
    turns: one with few would count as much as one with many.

    Args:
        test: Held-out texts; fewer only if there are fewer.
        seed: Seed of the shares; the held-out examples do not depend on it.
    """
    pool, held_out = split_by_class(task.examples, TEST_SHARE, SPLIT_SEED)
    if num_clients == 1:
        owners: tuple[tuple[int, ...], ...] = (tuple(range(len(pool))),)
    elif task.has_silos:
        owners = silo_clients(pool, num_clients)
    else:
        owners = dirichlet_clients(pool, num_clients, alpha, seed, at_least=each)
    drawn = tuple(take_by_class([pool[index] for index in owner], each, seed) for owner in owners)
    for number, examples in enumerate(drawn):
        if len(examples) < each:
            raise DataError(
                f"client {number} of {num_clients}: has {len(examples)} texts, but {each} are required; lower "
                "texts_per_client"
            )
    return ClientShares(drawn, take_by_class(held_out, test, SPLIT_SEED))
