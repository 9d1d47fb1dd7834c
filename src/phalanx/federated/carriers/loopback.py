"""The owner's end of our own carrier: signed frames over mutual TLS, to site processes that come and come back."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from phalanx.errors import CertificateError, PeerLostError, PeerRefusedError, TransportError
from phalanx.federated.carriers.carrier import CarriedReply, LostSite, SentOrder
from phalanx.federated.config import OWNER
from phalanx.security.crypto import Identity, certified_name, name_of_incarnation
from phalanx.transport import Endpoint, GrpcWire, JoinedPeer, LinkFault, TransportConfig

_LOOK_EVERY_S, _END_S = 0.5, 5.0
Say = Callable[[str], None]


class SiteProcesses(Protocol):
    """The processes of sites that were started here."""

    def restart_ended_sites(self) -> Mapping[str, str]:
        """Return the sites of which a process has ended since the last look, with how, and start them again."""

    def close(self) -> None:
        """End them all."""


class LoopbackCarrier:
    """A `Carrier` over our own transport.

    Args:
        session: Name of the session; frames of another one are refused.
        sites: Names of the sites of the run; no other caller is let in.
        say: Takes one line; called from the wire's threads as well.

    Guarantees:
        A reply is of the site that TLS and the signature of its frame prove, and of its latest process. A certificate
        that is not the authority's, has expired or was revoked gets no further than its handshake or its first call.
    """

    def __init__(
        self,
        identity: Identity,
        session: str,
        sites: Collection[str],
        transport: TransportConfig,
        revoked: Callable[[], Collection[str]],
        say: Say,
    ) -> None:
        self._sites, self._revoked, self._say = frozenset(sites), revoked, say
        self._lock = threading.Lock()
        self._begun: dict[str, int] = {}
        self._met: dict[str, tuple[int, JoinedPeer]] = {}
        self._names: dict[str, str] = {}
        self._cut: set[str] = set()
        self._lost: deque[LostSite] = deque()
        self._processes: SiteProcesses | None = None
        self._wire = GrpcWire(identity, transport)
        self._wire.name_of = self._name_of
        self._endpoint = Endpoint(identity, {}, session, self._wire, transport)

    @property
    def listen_address(self) -> str:
        """``host:port`` where it listens."""
        return self._wire.address

    def watch_processes(self, processes: SiteProcesses) -> None:
        """Look after these processes from now on."""
        self._processes = processes

    def present_sites(self) -> frozenset[str]:
        """As `Carrier` says; a site with a certificate that was revoked meanwhile is there no more."""
        self._meet_processes()
        for site in self._names.keys() & set(self._revoked()):
            self._say(f"the certificate of {site} was revoked")
            self._drop_site(site, "revoked")
        return frozenset(self._names)

    def await_sites(self, least: int, timeout_s: float) -> frozenset[str]:
        """Wait until so many sites, or all sites that will be in time, are there; return them."""
        deadline = time.monotonic() + timeout_s
        while len(present := self.present_sites()) < least and time.monotonic() < deadline:
            # None for as long as nothing of that name calls: a pause that ends with the wire
            self._wire.wait_joined("", _LOOK_EVERY_S)
        return present

    def broadcast_orders(self, orders: Mapping[str, SentOrder]) -> None:
        """As `Carrier` says."""
        for site, sent in orders.items():
            try:
                body = sent.order.model_dump(mode="json")
                self._endpoint.send_frame(self._names[site], sent.order.kind, body, (sent.payload,))
            except (KeyError, TransportError) as exc:
                self._drop_site(site, "gone" if isinstance(exc, KeyError) else type(exc).__name__)

    def collect_reply(self, timeout_s: float) -> CarriedReply | LostSite | None:
        """As `Carrier` says."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._meet_processes()
            if self._lost:
                return self._lost.popleft()
            left_s = deadline - time.monotonic()
            item = self._endpoint.receive_item(max(0.0, min(left_s, _LOOK_EVERY_S)))
            if isinstance(item, LinkFault):
                site = certified_name(item.peer)
                if self._names.get(site) == item.peer:
                    self._drop_site(site, "silent")
            elif item is not None:
                site = certified_name(item.sender)
                if self._names.get(site) == item.sender:
                    return CarriedReply(site, item.kind, item.body, item.payload)
            elif left_s <= 0:
                return None

    def close(self) -> None:
        """Stop listening, and end the processes that were started here."""
        with contextlib.suppress(PeerLostError):
            # word of the end, for those that still listen
            self._endpoint.flush_frames(_END_S)
        self._endpoint.close()
        if self._processes is not None:
            self._processes.close()

    def _meet_processes(self) -> None:
        """Meet the processes that have called since, and drop ended ones."""
        if self._processes is not None:
            for site, how in self._processes.restart_ended_sites().items():
                self._say(f"{site}: its process ended: {how}")
                self._drop_site(site, "gone")
        for site in self._sites:
            joined, met = self._wire.wait_joined(site, 0.0), self._met.get(site)
            with self._lock:
                number = self._begun.get(site, 0)
            # its number comes with the call of a process that begins, where it listens a moment later
            if joined is None or (met is not None and (number == met[0] or joined is met[1])):
                continue
            name = name_of_incarnation(site, number)
            self._met[site] = (number, joined)
            if self._names.get(site) is not None:
                self._drop_site(site, "restarted")
            self._endpoint.add_peer(joined.peer.with_session_name(name), joined.address)
            self._names[site] = name
            with self._lock:
                self._cut.discard(site)

    def _drop_site(self, site: str, reason: str) -> None:
        """Part from a site's process; it is told so when it asks, and may begin anew."""
        self._lost.append(LostSite(site, reason))
        name = self._names.pop(site, None)
        with self._lock:
            self._cut.add(site)
        if name is not None:
            self._endpoint.evict_party(name)

    def _name_of(self, certified: str, begins: bool) -> str | None:
        try:
            is_revoked = certified in self._revoked()
        except CertificateError as exc:
            raise PeerRefusedError("the list of revocations cannot be read, so no site is admitted") from exc
        if is_revoked or certified not in self._sites:
            why = "was revoked" if is_revoked else "belongs to no site of this run; federated.sites lists them"
            self._say(f"refused a caller: the certificate of {certified} {why}")
            raise PeerRefusedError(f"the certificate of {certified} {why}")
        with self._lock:
            if begins:
                self._begun[certified] = self._begun.get(certified, 0) + 1
            elif certified in self._cut or certified not in self._begun:
                raise PeerRefusedError(f"{certified}: is not in {OWNER}'s session; connect again")
            return name_of_incarnation(certified, self._begun[certified])
