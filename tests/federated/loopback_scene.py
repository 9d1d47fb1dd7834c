"""Rounds over our own carrier: real TLS on the loopback, an owner here and each site in a thread."""

import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch
from rounds_scene import RUN, BookInMemory, Parabola

from machine_patience import patience_s as machine_patience_s
from phalanx.errors import PhalanxError
from phalanx.federated.carriers.carrier import SiteAnswers
from phalanx.federated.carriers.loopback import LoopbackCarrier
from phalanx.federated.carriers.loopback_site import OwnerCall, serve_owner
from phalanx.federated.config import FederatedConfig
from phalanx.federated.rounds.coordinator import RoundCoordinator
from phalanx.federated.rounds.fleet import Fleet
from phalanx.federated.rounds.journal import RoundJournal
from phalanx.federated.rounds.site import Site
from phalanx.federated.rounds.terms import RunTerms
from phalanx.security.crypto import Identity, RevokedParties, create_authority, issue_certificate, load_identity
from phalanx.transport import TransportConfig

# a full machine leaves a live site without a processor for longer than a quiet one
LIMITS = TransportConfig(timeout_s=machine_patience_s(20.0), keepalive_s=min(600.0, machine_patience_s(5.0)))
SITES = ("north", "south", "west", "east")


class DeadSiteError(Exception):
    """A site's process has ended in the middle of an order."""


class LoopbackScene:
    """An owner that listens, and sites that call it.

    Args:
        home: Of keys and journal.
        section: Keys of ``[federated]`` beside `sites`.
    """

    def __init__(self, home: Path, **section) -> None:
        self.home, self.keys = home, home / "keys"
        create_authority(self.keys, now=datetime.now(UTC) - timedelta(days=30))
        for name in ("owner", *SITES):
            issue_certificate(self.keys, name)
        self.identities = {name: load_identity(self.keys / name) for name in ("owner", *SITES)}
        self.config = FederatedConfig(sites=SITES, max_norm=100.0, deadline_s=30.0, **section)
        roster = {name: self.identities[name].public for name in SITES}
        owner = self.identities["owner"]
        self.terms = RunTerms("run-1", RUN, self.config, 0, owner.public, roster, 10)
        self.trainers = {name: Parabola(torch.tensor([float(n), 1.0])) for n, name in enumerate(SITES)}
        self.said: list[str] = []
        self.ended: dict[str, BaseException | None] = {}
        self.threads: list[threading.Thread] = []
        self.carrier = LoopbackCarrier(
            owner, f"{RUN[:16]}-1", SITES, LIMITS, RevokedParties(self.keys).read_revocations, self.said.append
        )
        self.fleet = Fleet(self.carrier)
        self.owner = RoundCoordinator(
            self.terms, owner, self.fleet, RoundJournal(home / "journal"), {"w": torch.zeros(2)}
        )

    def site(self, name: str) -> Site:
        directory = self.home / "sites" / name
        directory.mkdir(parents=True, exist_ok=True)
        return Site(self.identities[name], self.terms, self.trainers[name], BookInMemory(), directory)

    def call(
        self,
        name: str,
        identity: Identity | None = None,
        answer: SiteAnswers | None = None,
        session: str = RUN[:16],
        patience_s: float = 30.0,
    ) -> threading.Thread:
        """Have a site's process call the owner."""
        identity = identity or self.identities[name]
        call = OwnerCall(
            identity, self.identities["owner"].public, self.carrier.listen_address, session, LIMITS, patience_s
        )
        answer = answer or self.site(name).answer_order

        def run() -> None:
            try:
                serve_owner(call, answer, self.said.append)
                self.ended[name] = None
            except (PhalanxError, DeadSiteError) as exc:
                self.ended[name] = exc

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self.threads.append(thread)
        return thread

    def call_all(self) -> None:
        for name in SITES:
            self.call(name)
        assert self.carrier.await_sites(len(SITES), 30.0) == frozenset(SITES)

    def expired(self, name: str, now: datetime) -> Identity:
        """A site's identity of another time."""
        other = self.keys / "other"
        (self.keys / name).rename(other)
        issue_certificate(self.keys, name, days=5, now=now)
        return load_identity(self.keys / name, now)

    def close(self) -> None:
        self.fleet.end_sites()
        self.carrier.close()
        for thread in self.threads:
            thread.join(10.0)
