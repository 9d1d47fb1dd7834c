"""Batches of several clients, each from its own share of the sequences."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from phalanx.config import canonical_json
from phalanx.data import Batch, BatchLoader
from phalanx.data.loader import Sequences
from phalanx.errors import CheckpointError
from phalanx.split import microbatches_of


class ClientLoader:
    """A loader that joins the draws of all clients, in the order of the microbatches.

    Args:
        corpus: Shared out: client k of n has every nth sequence from the kth on; or each client's own, by name.
        clients: Party names, in the order of their turns.
        batch_size: Sequences of a step, or pairs of them.
        microbatches: Microbatches of a step; clients take turns.
    """

    def __init__(
        self,
        corpus: Sequences | Mapping[str, Sequences],
        clients: Sequence[str],
        batch_size: int,
        microbatches: int,
        seed: int,
    ) -> None:
        rows = batch_size // microbatches
        self._turns = {name: microbatches_of(name, microbatches, clients) for name in clients}
        self._loaders = {
            name: BatchLoader(corpus[name], rows * len(self._turns[name]), seed)
            if isinstance(corpus, Mapping)
            else BatchLoader(corpus, rows * len(self._turns[name]), seed, (number, len(clients)))
            for number, name in enumerate(clients)
        }

    @property
    def corpus_digest(self) -> str:
        """Return the SHA-256 in hex of the corpus that clients share, or of each client's own, by its name."""
        digests = {name: loader.corpus_digest for name, loader in self._loaders.items()}
        shared = set(digests.values())
        return shared.pop() if len(shared) == 1 else hashlib.sha256(canonical_json(digests)).hexdigest()

    def next_batch(self) -> Batch:
        """The next batch, ``[batch_size, seq]``."""
        parts: dict[int, Batch] = {}
        for name, loader in self._loaders.items():
            turns = self._turns[name]
            parts.update(zip(turns, loader.next_batch().split_microbatches(len(turns)), strict=True))
        ordered = [parts[number] for number in sorted(parts)]
        return Batch(
            torch.cat([client_batch.input_ids for client_batch in ordered]),
            torch.cat([client_batch.labels for client_batch in ordered]),
            tuple(index for client_batch in ordered for index in client_batch.indices),
            {name: torch.cat([client_batch.extras[name] for client_batch in ordered]) for name in ordered[0].extras},
        )

    def position_state(self) -> dict[str, Any]:
        """Where every client's loader is."""
        return {name: loader.position_state() for name, loader in self._loaders.items()}

    def load_position(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken."""
        if set(state) != set(self._loaders):
            raise CheckpointError(
                f"loader state: belongs to {sorted(state)[:5]}, but this run has {sorted(self._loaders)[:5]}; "
                "resume with the run file of the run that was saved"
            )
        for name, loader in self._loaders.items():
            loader.load_position(state[name])
