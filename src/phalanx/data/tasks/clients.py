"""Examples shared out to clients that do not all see the same classes."""

import random
from collections.abc import Sequence

from phalanx.data.tasks.task import Example
from phalanx.errors import DataError

_ATTEMPTS = 1000


def dirichlet_clients(
    examples: Sequence[Example], num_clients: int, alpha: float, seed: int, *, at_least: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Share examples out so that each class has its own, uneven shares of the clients.

    Args:
        examples: At least ``num_clients * at_least``.
        num_clients: Two or more.
        alpha: Of the symmetric Dirichlet distribution over clients, drawn anew for every class: far below 1 each class
            lies with few clients, far above 1 all clients are alike.
        seed: Decides everything.
        at_least: Examples of every client; a draw that gives one fewer is drawn again.

    Returns:
        Indices of each client's examples, ascending; each example is in exactly one.

    Raises:
        DataError: The numbers make no sense, or no draw gave every client enough.

    Source: Hsu et al. 2019, section 3 (shares by class; here each class is dealt out, so that sizes vary as well).
    """
    if num_clients < 2 or not 0 < alpha < float("inf") or at_least < 1:
        raise DataError(
            f"{num_clients} clients, alpha {alpha}, at least {at_least}: expected 2 or more, > 0, 1 or more"
        )
    generator = random.Random(f"phalanx clients {seed} {num_clients} {alpha!r}")  # noqa: S311 - a partition, no secret
    for _ in range(_ATTEMPTS):
        drawn = _draw(examples, num_clients, alpha, generator)
        if min(len(client) for client in drawn) >= at_least:
            return drawn
    raise DataError(
        f"{len(examples)} examples: no draw in {_ATTEMPTS} gave each of {num_clients} clients {at_least}; "
        "raise alpha or take more examples"
    )


def silo_clients(examples: Sequence[Example], num_clients: int) -> tuple[tuple[int, ...], ...]:
    """Share examples out by their collector: a silo is never divided.

    The largest silo first, each to the client that has least so far.

    Raises:
        DataError: An example has no silo, or there are fewer silos than clients.
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


def _draw(
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
            end = len(members) if client is clients[-1] else round(reached * len(members))
            client.extend(members[begin:end])
            begin = max(begin, end)
    return tuple(tuple(sorted(client)) for client in clients)
