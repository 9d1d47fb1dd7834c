"""Clients and a server of a secure sum in one process, and a walk through a round in which any party may be silent."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from phalanx.errors import AggregationError
from phalanx.security.aggregate import (
    CohortMember,
    ExpectedRound,
    SumClient,
    SumRefusal,
    SumResult,
    SumServer,
    SumTerms,
)
from phalanx.security.crypto import Identity


def identity(name: str) -> Identity:
    """A party with the same key in each run: masks are made of the cohort's keys too, and tests look at their bits."""
    return Identity(name, Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest()))


SERVER = identity("server")
CLIENTS = [identity(f"site-{number:02d}") for number in range(40)]
RUN, MODEL = "1" * 64, "2" * 64
PHASES = ("join", "share", "mask", "consent", "release")


class RoundsInMemory:
    """A book of rounds that lives as long as the test."""

    def __init__(self) -> None:
        self.last: dict[str, int] = {}

    def enter_round(self, run: str, number: int) -> None:
        if number <= self.last.get(run, 0):
            raise AggregationError(SumRefusal.REPEATED_ROUND, f"round {number}")
        self.last[run] = number


class ForgetfulRounds:
    """No book at all: the defence against a round that is asked for twice, switched off."""

    def enter_round(self, run: str, number: int) -> None:
        pass


def terms_of(count: int, **changes) -> SumTerms:
    cohort = tuple(CohortMember(name=one.name, key=one.public.public_key.hex()) for one in CLIENTS[:count])
    given = {"run": "run-1", "run_digest": RUN, "model_digest": MODEL, "round": 1, "length": 5, "clip": 1.0}
    return SumTerms(**{**given, "cohort": cohort, "minimum": 3, **changes})


def expected_of(terms: SumTerms, **changes) -> ExpectedRound:
    roster = {one.name: one.public for one in CLIENTS}
    given = {name: getattr(terms, name) for name in ("run", "run_digest", "model_digest", "length", "minimum")}
    return ExpectedRound(**{**given, "server": SERVER.public, "roster": roster, **changes})


def clients_of(terms: SumTerms, kind: Callable[..., SumClient] = SumClient, rounds=None) -> dict[str, SumClient]:
    names = set(terms.client_names)
    return {one.name: kind(one, expected_of(terms), rounds or RoundsInMemory()) for one in CLIENTS if one.name in names}


@dataclass
class Walk:
    """A round, phase by phase.

    Attributes:
        silent: Names by the phase from which on they say nothing.
        weights: By name.
        seen: Everything that the server got, by phase and name.
    """

    terms: SumTerms
    values: dict[str, np.ndarray]
    silent: dict[str, set[str]] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    clients: dict[str, SumClient] = field(default_factory=dict)
    seen: dict[str, dict[str, object]] = field(default_factory=lambda: {phase: {} for phase in PHASES})

    def run(self) -> SumResult:
        """Walk to the end; return the sum."""
        self.clients = self.clients or clients_of(self.terms)
        server = SumServer(self.terms, SERVER)
        for name in self.here("join"):
            self.said("join", name, server.take_advert, self.clients[name].join_round(server.invitation))
        adverts = server.close_adverts()
        for name in self.here("share"):
            self.said("share", name, server.take_boxes, self.clients[name].share_secrets(adverts))
        deliveries = server.close_boxes()
        for name in self.here("mask"):
            deposit = self.clients[name].mask_values(deliveries[name], self.values[name], self.weights.get(name, 1))
            self.seen["mask"][name] = deposit
            server.take_deposit(deposit.message, deposit.values)
        deposits = server.close_deposits()
        for name in self.here("consent"):
            self.said("consent", name, server.take_consent, self.clients[name].sign_consent(deposits))
        consents = server.close_consents()
        for name in self.here("release"):
            self.said("release", name, server.take_release, self.clients[name].release_shares(consents))
        return server.unmask_sum()

    def here(self, phase: str) -> list[str]:
        gone = set().union(*(self.silent.get(one, set()) for one in PHASES[: PHASES.index(phase) + 1]))
        return [name for name in self.terms.client_names if name not in gone]

    def said(self, phase: str, name: str, take: Callable[[bytes], str], message: bytes) -> None:
        self.seen[phase][name] = message
        take(message)


def values_for(terms: SumTerms, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw values within the clip, so that what comes out can be compared with plain sums."""
    draw = np.random.default_rng(seed)
    found = {name: draw.normal(size=terms.length).astype(np.float32) for name in terms.client_names}
    return {name: one / np.float32(max(1.0, np.linalg.norm(one) / terms.clip)) for name, one in found.items()}
