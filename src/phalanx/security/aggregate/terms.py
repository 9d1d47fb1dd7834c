"""The terms of one round of a secure sum, which the server signs and every key and signature is bound to."""

from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from phalanx.config import StrictModel, canonical_json
from phalanx.security.aggregate.encoding import LEAST_LEVELS, RingEncoding
from phalanx.security.aggregate.graph import Degree, degree_of, most_colluding, neighbours_of, threshold_of
from phalanx.security.crypto import digest_hex, in_domain

MOST_CLIENTS = 1000
MOST_VALUES = 2**31
LEAST_CONTRIBUTORS = 3
"""Of two clients each would learn what the other one sent."""

Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
PartyName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}\z")]


class CohortMember(StrictModel):
    """A client of a cohort.

    Attributes:
        key: Its Ed25519 public key.
    """

    name: PartyName
    key: Hex32


class SumTerms(StrictModel):
    """The terms of one round; everything else is computed from them in the same way by all parties.

    Attributes:
        run_digest: Digest of the run file.
        model_digest: Digest of the model that the clients' values are relative to.
        round: Number of the round, from 1; a client takes part in each once.
        cohort: All clients that may take part, by name.
        length: Number of values per client.
        clip: Bound of the Euclidean norm of a client's values.
        max_weight: Largest weight of a client.
        bits: Bits of the ring's elements.
        minimum: Clients that a sum must have at least.
    """

    version: Literal[1] = 1
    run: Annotated[str, Field(pattern=r"^[!-~]{1,128}\z")]
    run_digest: Hex32
    model_digest: Hex32
    round: Annotated[int, Field(ge=1, lt=2**53)]
    cohort: Annotated[tuple[CohortMember, ...], Field(min_length=LEAST_CONTRIBUTORS, max_length=MOST_CLIENTS)]
    length: Annotated[int, Field(ge=1, le=MOST_VALUES)]
    clip: Annotated[float, Field(gt=1e-30, lt=1e30)]
    max_weight: Annotated[int, Field(ge=1, le=2**20)] = 1
    bits: Literal[32] = 32
    minimum: Annotated[int, Field(ge=LEAST_CONTRIBUTORS, le=MOST_CLIENTS)]

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        names = [member.name for member in self.cohort]
        if names != sorted(set(names)):
            raise ValueError("cohort: expected each name once, in order")
        if len({member.key for member in self.cohort}) != len(names):
            raise ValueError("cohort: two names have one key")
        if self.minimum > self.threshold:
            raise ValueError(
                f"minimum = {self.minimum}: a round of {len(names)} clients may end with {self.threshold}; "
                "lower it, or ask more clients"
            )
        if self.encoding.levels < LEAST_LEVELS:
            raise ValueError(
                f"max_weight = {self.max_weight} times {len(names)} clients leaves {self.encoding.levels} levels for "
                f"a value, expected {LEAST_LEVELS}; lower it"
            )
        return self

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The clients' names, in order."""
        return tuple(member.name for member in self.cohort)

    @property
    def threshold(self) -> int:
        """Clients that must agree on the list of those in the sum: more than two thirds of all."""
        return threshold_of(len(self.cohort))

    @property
    def most_colluding(self) -> int:
        """Clients that may collude with the server without learning more than a sum."""
        return most_colluding(len(self.cohort))

    @property
    def degree(self) -> Degree:
        """Neighbours of a client, and shares that give its secrets back."""
        return degree_of(len(self.cohort), self.minimum)

    @property
    def encoding(self) -> RingEncoding:
        """The encoding of values as elements of the ring."""
        return RingEncoding(len(self.cohort), self.clip, self.max_weight)

    @cached_property
    def digest(self) -> str:
        """BLAKE3 over all of them; every signature and key of the round is bound to it."""
        return digest_hex(in_domain("aggregate-terms/1", canonical_json(self.model_dump(mode="json"))))

    def neighbours(self, adverts_digest: str) -> dict[str, tuple[str, ...]]:
        """Return the neighbours of each client, once all adverts are known."""
        return neighbours_of(self.names, bytes.fromhex(adverts_digest), self.minimum)
