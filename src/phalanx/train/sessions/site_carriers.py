"""The carrier that a run file names, open: with processes of this machine, or a socket for an engine."""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Protocol

from phalanx.federated.carriers.bridge import BridgeCarrier, OwnerSocket
from phalanx.federated.carriers.carrier import Carrier
from phalanx.federated.carriers.loopback import LoopbackCarrier
from phalanx.federated.rounds.terms import RunTerms
from phalanx.security.crypto import RevokedParties
from phalanx.telemetry import MissingNotice
from phalanx.train.config import FederatedRun
from phalanx.train.sessions.context import SessionContext
from phalanx.train.sessions.site_file import SiteFile, session_prefix
from phalanx.train.sessions.site_processes import LocalSites, new_session

_LOOK_EVERY_S = 5.0
OWNER_SOCKET = Path("bridge") / "owner.sock"
"""In the run directory: where an engine's server takes frames."""


class OpenCarrier(Carrier, Protocol):
    """A carrier that sites come to."""

    def await_sites(self, least: int, timeout_s: float) -> frozenset[str]:
        """Wait until this many sites have joined, or until the deadline; return the sites that have."""


def await_sites_in_time(
    carrier: OpenCarrier, sites: Collection[str], timeout_s: float, say: Callable[[str], None]
) -> frozenset[str]:
    """Wait for the sites of a run, and print meanwhile which are missing; return the sites that came in time."""
    notice, deadline, there = MissingNotice(say, timeout_s, sites), time.monotonic() + timeout_s, frozenset[str]()
    while len(there) < len(sites) and (left_s := deadline - time.monotonic()) > 0:
        there = carrier.await_sites(len(there) + 1, min(left_s, _LOOK_EVERY_S))
        notice.waits_for(set(sites) - there)
    return there


@contextlib.contextmanager
def open_carrier(context: SessionContext[FederatedRun], terms: RunTerms) -> Iterator[OpenCarrier]:
    """Open the carrier of a run, and close it."""
    home, section = context.home, context.run.federated
    session, revoked = new_session(session_prefix(context.run)), RevokedParties(home.pki_directory).read_revocations
    with contextlib.ExitStack() as stack:
        if section.carrier == "bridge":
            path = home.path / OWNER_SOCKET
            post = OwnerSocket(path, session, section.transport)
            bridge = BridgeCarrier(home.owner, post, terms.roster, revoked, context.print_line)
            stack.callback(bridge.close)
            context.print_line(f"waiting for an engine on {path}")
            yield bridge
            return
        loopback = LoopbackCarrier(home.owner, session, section.sites, section.transport, revoked, context.print_line)
        files = _make_site_files(context, loopback.listen_address)
        sites = LocalSites(home.path / "sites", files, context.run.train.threads, section.respawns)
        stack.callback(sites.kill_sites)
        # sites that have been told that the run is over close their own logs meanwhile
        stack.callback(loopback.close)
        stack.push(_on_failure(sites.kill_sites))
        loopback.watch_processes(sites)
        sites.start_sites()
        yield loopback


def _on_failure(act: Callable[[], None]) -> Callable[[type[BaseException] | None, object, object], None]:
    """Return what acts at the end of a context that an error ends."""

    def leave(kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None:
            act()

    return leave


def site_log_hint(context: SessionContext[FederatedRun]) -> str:
    """Say where a person finds why a site is not there."""
    if context.run.federated.carrier == "bridge":
        return "check the engine's job and `phalanx site` at each of them"
    return f"see {context.home.path / 'sites'}/NAME.log"


def _make_site_files(context: SessionContext[FederatedRun], address: str) -> dict[str, SiteFile]:
    home = context.home
    return {
        site: SiteFile(
            run=str((home.path / "config.toml").resolve()),
            identity=str((home.pki_directory / site).resolve()),
            certificates=str(home.pki_directory.resolve()),
            directory=str((home.path / "sites" / site).resolve()),
            owner=address,
            cache=str(home.cache_directory.resolve()),
            transport=context.run.federated.transport,
        )
        for site in context.run.federated.sites
    }
