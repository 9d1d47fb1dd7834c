"""The terms of one round of a secure sum, which the server signs and every key and signature is bound to."""

from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from phalanx.config import StrictModel, canonical_json
from phalanx.security.aggregate.encoding import MIN_LEVELS, RingEncoding
from phalanx.security.aggregate.graph import Degree, degree_of, max_colluding, neighbours_of, threshold_of
from phalanx.security.crypto import digest_hex, in_domain

MAX_CLIENTS = 1000
MAX_VALUES = 2**31
MIN_CONTRIBUTORS = 3
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
        model_digest: Digest of the model that the clients' values are relative to.
        round: Number of the round, from 1; a client takes part in each once.
        cohort: All clients that may take part, by name.
        length: Number of values per client.
        clip: Bound of the Euclidean norm of a client's values.
        bits: Bits of the ring's elements.
        minimum: Clients that a sum must have at least.
    """

    version: Literal[1] = 1
    run: Annotated[str, Field(pattern=r"^[!-~]{1,128}\z")]
    run_digest: Hex32
    model_digest: Hex32
    round: Annotated[int, Field(ge=1, lt=2**53)]
    cohort: Annotated[tuple[CohortMember, ...], Field(min_length=MIN_CONTRIBUTORS, max_length=MAX_CLIENTS)]
    length: Annotated[int, Field(ge=1, le=MAX_VALUES)]
    clip: Annotated[float, Field(gt=1e-30, lt=1e30)]
    max_weight: Annotated[int, Field(ge=1, le=2**20)] = 1
    bits: Literal[32] = 32
    minimum: Annotated[int, Field(ge=MIN_CONTRIBUTORS, le=MAX_CLIENTS)]

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        names = [member.name for member in self.cohort]
        if names != sorted(set(names)):
            raise ValueError("cohort: expected each name once, in order")
        if len({member.key for member in self.cohort}) != len(names):
            raise ValueError("cohort: two names have one key")
        if self.minimum > self.consent_threshold:
            raise ValueError(
                f"minimum = {self.minimum}: a round of {len(names)} clients may end with {self.consent_threshold}; "
                "lower it, or ask more clients"
            )
        if self.ring_encoding.max_level < MIN_LEVELS:
            raise ValueError(
                f"max_weight = {self.max_weight} times {len(names)} clients leaves {self.ring_encoding.max_level} "
                f"levels for a value, expected {MIN_LEVELS}; lower it"
            )
        return self

    @cached_property
    def client_names(self) -> tuple[str, ...]:
        """The clients' names, in order."""
        return tuple(member.name for member in self.cohort)

    @property
    def consent_threshold(self) -> int:
        """Clients that must agree on the list of those in the sum: more than two thirds of all."""
        return threshold_of(len(self.cohort))

    @property
    def max_colluding(self) -> int:
        """Clients that may collude with the server without learning more than a sum."""
        return max_colluding(len(self.cohort))

    @property
    def graph_degree(self) -> Degree:
        """Neighbours of a client, and shares that give its secrets back."""
        return degree_of(len(self.cohort), self.minimum)

    @property
    def ring_encoding(self) -> RingEncoding:
        """The encoding of values as elements of the ring."""
        return RingEncoding(len(self.cohort), self.clip, self.max_weight)

    @cached_property
    def terms_digest(self) -> str:
        """BLAKE3 over all of them; every signature and key of the round is bound to it."""
        return digest_hex(in_domain("aggregate-terms/1", canonical_json(self.model_dump(mode="json"))))

    def neighbours_by_client(self, adverts_digest: str) -> dict[str, tuple[str, ...]]:
        """Return the neighbours of each client, once all adverts are known."""
        return neighbours_of(self.client_names, bytes.fromhex(adverts_digest), self.minimum)
