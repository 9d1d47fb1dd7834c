"""Rounds over the bridge: an owner here, each site in a thread, and an engine that only forwards."""

import threading
from pathlib import Path

from loopback_scene import DeadSiteError

from phalanx.federated.carriers.bridge import BridgeCarrier, OwnerSocket
from phalanx.federated.carriers.bridge_site import BridgedSite, serve_bridge
from phalanx.federated.carriers.carrier import SiteAnswers
from phalanx.federated.carriers.shim import END, OwnerConnection, SocketLostError, ask_site
from phalanx.federated.rounds.terms import RunTerms
from phalanx.security.crypto import Identity
from phalanx.transport import TransportConfig

LIMITS = TransportConfig(max_frame_bytes=2**20)


class ForwardingEngine:
    """An engine: takes frames from the owner, and has each delivered at its site's socket.

    Args:
        owner: Socket of the owner.
        sites: Socket of each site, by name.

    Attributes:
        touch: Alters what a site has answered before it is handed in; takes the site, its answer and the frame asked.
        frames: All that were delivered, by site.
    """

    def __init__(self, owner: Path, sites: dict[str, Path]) -> None:
        self.sites = sites
        self.touch = lambda site, answer, frame: answer
        self.frames: dict[str, list[bytes]] = {site: [] for site in sites}
        self._line = OwnerConnection(str(owner))
        self._line.tell_sites(sites)
        self._thread = threading.Thread(target=self._forward, daemon=True)
        self._thread.start()

    def _forward(self) -> None:
        try:
            while (order := self._line.next_frame(30.0)) is not None and order.kind != END:
                threading.Thread(target=self._deliver, args=(order,), daemon=True).start()
        except SocketLostError:
            return

    def _deliver(self, order) -> None:
        self.frames[order.name].append(order.data)
        try:
            answer = ask_site(str(self.sites[order.name]), order.data)
            self._line.send_answer(order.number, order.name, self.touch(order.name, answer, order.data))
        except SocketLostError as exc:
            try:
                self._line.report_loss(order.number, order.name, str(exc))
            except SocketLostError:
                return

    def tell_sites(self, *names: str) -> None:
        self._line.tell_sites(names)

    def close(self) -> None:
        self._line.close()
        self._thread.join(10.0)


class BridgeScene:
    """An owner's bridge and the processes of sites.

    Args:
        home: Of sockets; a short path.
        terms: Of the run.
        identities: The owner's and all sites'.
        session: Of the owner.
        engine: Between them.
    """

    def __init__(
        self, home: Path, terms: RunTerms, identities: dict[str, Identity], session: str, engine=ForwardingEngine
    ) -> None:
        self.home, self.terms, self.identities, self.prefix = home, terms, identities, session[:16]
        self.said: list[str] = []
        self.revoked: set[str] = set()
        self.threads: dict[str, threading.Thread] = {}
        post = OwnerSocket(home / "owner" / "owner.sock", session, LIMITS)
        self.carrier = BridgeCarrier(identities["owner"], post, terms.roster, lambda: self.revoked, self.said.append)
        self.engine = engine(self.carrier.path, {name: self.socket(name) for name in terms.roster})

    def socket(self, name: str) -> Path:
        return self.home / name / "site.sock"

    def serve(self, name: str, answer: SiteAnswers, session: str | None = None) -> None:
        """Begin a site's process."""
        site = BridgedSite(self.identities[name], self.terms.owner, self.socket(name), session or self.prefix, LIMITS)
        thread = threading.Thread(target=self._serve, args=(name, site, answer), daemon=True)
        self.threads[name] = thread
        thread.start()

    def _serve(self, name: str, site: BridgedSite, answer: SiteAnswers) -> None:
        try:
            serve_bridge(site, answer, self.said.append)
        except DeadSiteError:
            self.said.append(f"{name}: died")

    def close(self) -> None:
        self.carrier.close()
        self.engine.close()
