"""The shares of a task's texts: each client's, and the held-out ones, the same for every way of training together."""

from dataclasses import dataclass

from phalanx.data.tasks.clients import dirichlet_clients, silo_clients
from phalanx.data.tasks.split import split_by_class, take_by_class
from phalanx.data.tasks.task import Example, LabelledExamples
from phalanx.errors import DataError

TEST_SHARE = 0.2
"""Of every class, from which the held-out texts are drawn."""
SPLIT_SEED = 0
"""Of what is held out: the same for every seed of a run."""


@dataclass(frozen=True)
class Shares:
    """A task's texts, dealt out.

    Attributes:
        clients: Training texts of each client, as many of each.
        test: Held-out texts, which no client has.
    """

    clients: tuple[tuple[Example, ...], ...]
    test: tuple[Example, ...]

    @property
    def train(self) -> tuple[Example, ...]:
        """All training texts, client by client."""
        return tuple(example for examples in self.clients for example in examples)


def share_out(task: LabelledExamples, num_clients: int, each: int, test: int, alpha: float, seed: int) -> Shares:
    """Share a task's texts out to clients that do not all see the same classes.

    By silo where the texts name their collector, else by class. Clients have the same number of texts, for they take
    turns: one with few would count as much as one with many.

    Args:
        task: The texts.
        num_clients: One or more.
        each: Training texts of a client.
        test: Held-out texts; fewer only if there are fewer.
        alpha: As for `dirichlet_clients`.
        seed: Of the shares; what is held out does not depend on it.

    Raises:
        DataError: There are too few texts, or fewer of a client than it has classes.
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
                f"client {number} of {num_clients}: has {len(examples)} texts of its own and {each} are wanted; lower "
                "texts_per_client"
            )
    return Shares(drawn, take_by_class(held_out, test, SPLIT_SEED))
