"""The order of clients in a step: they take turns with its microbatches."""

from collections.abc import Sequence


def client_of(microbatch: int, clients: Sequence[str]) -> str:
    """Return the client of a microbatch: clients take turns."""
    return clients[microbatch % len(clients)]


def microbatches_of(client: str, microbatches: int, clients: Sequence[str]) -> list[int]:
    """The microbatches of a step that are a client's."""
    return [number for number in range(microbatches) if client_of(number, clients) == client]
