"""What a step's lines say of its samples: one digest, which a list of sequence numbers either has or has not."""

from collections.abc import Callable, Sequence

from phalanx.config import canonical_json
from phalanx.security.crypto import digest_hex, in_domain

_DOMAIN = "samples/1"
_MAX_STEPS = 4096
"""Kept at a time: the record of a step comes when its audits are in, at the latest after an undone step is redone."""


def samples_digest(indices: Sequence[int]) -> str:
    """Return the digest of a step's samples: numbers of sequences of the corpus, in the order of the batch."""
    return digest_hex(in_domain(_DOMAIN, canonical_json(list(indices))))


class StepSamples:
    """The digests of the samples that the latest steps were given."""

    def __init__(self) -> None:
        self._digests: dict[int, str] = {}

    def note_samples(self, step: int, indices: Sequence[int]) -> None:
        """Note a step's batch; a batch in the place of one that failed counts instead of it."""
        self._digests.pop(step, None)
        self._digests[step] = samples_digest(indices)
        while len(self._digests) > _MAX_STEPS:
            del self._digests[next(iter(self._digests))]

    def digest_of_step(self, step: int) -> str | None:
        """Return the digest of a step's samples; None where it is not known any more."""
        return self._digests.get(step)


DigestOfStep = Callable[[int], str | None]
"""`StepSamples.digest_of_step`, as others get it."""
