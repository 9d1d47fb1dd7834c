"""The batches of an owner that sees no text: it counts draws, and every client draws from its own texts."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from phalanx.data import IGNORE, Batch
from phalanx.errors import CheckpointError, DataError


class RemoteTurns:
    """A loader of draws; its batches have the shape of a step and no text in them."""

    corpus_digest = None
    """Texts are with the clients, which commit to them."""
    num_validation_sequences = 0
    """Held-out texts are the clients'."""

    def __init__(self, batch_size: int, seq: int) -> None:
        self._shape, self.drawn = (batch_size, seq), 0
        self._commitments: dict[str, str] = {}

    def next_batch(self) -> Batch:
        """The next draw."""
        first = self.drawn * self._shape[0]
        self.drawn += 1
        indices = tuple(range(first, first + self._shape[0]))
        return Batch(torch.zeros(self._shape, dtype=torch.int64), torch.full(self._shape, IGNORE), indices)

    def validation_batch(self, indices: Sequence[int]) -> Batch:
        """Refuse: there is no held-out text here."""
        raise DataError(f"held-out texts {list(indices)[:5]} are on the clients' machines")

    def take_commitments(self, commitments: Mapping[str, str]) -> None:
        """Take the clients' commitments to their texts."""
        other = [name for name, digest in commitments.items() if self._commitments.get(name, digest) != digest]
        if other:
            raise CheckpointError(
                f"{', '.join(other)}: its texts changed since the start of the run, or its directory is lost; "
                "resume with the earlier texts, or begin a new run"
            )
        self._commitments = dict(commitments)

    def position_state(self) -> dict[str, Any]:
        """How many batches were drawn, and what clients are bound to."""
        return {"draws": self.drawn, "clients": dict(self._commitments)}

    def load_position(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken."""
        draws, clients = state.get("draws"), state.get("clients")
        if type(draws) is not int or draws < 0 or not isinstance(clients, dict):
            raise CheckpointError(
                "loader state: does not belong to a run with remote clients; resume the run that was saved"
            )
        self.drawn, self._commitments = draws, {str(name): str(digest) for name, digest in clients.items()}
