"""A site's end of our own carrier: it calls the owner, answers orders, and calls again where a session breaks off."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.errors import FrameError, PeerGoneError, PeerLostError, PeerRefusedError
from phalanx.federated.carriers import messages as m
from phalanx.federated.carriers.carrier import SiteAnswers
from phalanx.federated.config import OWNER
from phalanx.security.crypto import Identity, Peer
from phalanx.transport import Endpoint, GrpcWire, LinkFault, TransportConfig, ask_peer_run, parse_body

_LOOK_EVERY_S = 5.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class OwnerCall:
    """The caller, and where the owner is.

    Attributes:
        address: ``host:port`` of it.
    """

    identity: Identity
    owner: Peer
    address: str
    session: str
    transport: TransportConfig
    patience_s: float


def serve_owner(call: OwnerCall, answer: SiteAnswers, say: Say) -> None:
    """Answer orders until the owner says that the run is over, in as many sessions as it takes."""
    while not _serve_session(call, answer, say):
        say("looking for the owner again")


def _serve_session(call: OwnerCall, answer: SiteAnswers, say: Say) -> bool:
    """Serve one session; return whether the run is over, and not only the session."""
    wire = GrpcWire(call.identity, call.transport)
    try:
        met = ask_peer_run(
            call.identity, OWNER, call.address, wire.address, call.transport, call.patience_s, begins=True
        )
        if met.peer != call.owner:
            raise PeerRefusedError(f"{call.address}: its key differs from the owner's certificate here")
        if not met.run.startswith(call.session):
            raise FrameError(f"{call.address}: serves run {met.run[:20]}, but this site agreed to {call.session[:20]}")
        identity = call.identity.with_session_name(met.calls_us)
        # known from the first moment: the owner has heard of this process, and a stranger's frame ends its link
        with Endpoint(identity, {OWNER: met.peer}, met.run, wire, call.transport) as endpoint:
            endpoint.add_peer(met.peer, call.address)
            say(f"{identity.name}: joined the owner's session")
            try:
                return _answer_orders(call, endpoint, wire.address, answer)
            except PeerLostError as exc:
                say(f"the session is over: {exc}")
                return False
    finally:
        wire.close()


def _answer_orders(call: OwnerCall, endpoint: Endpoint, own: str, answer: SiteAnswers) -> bool:
    answered = time.monotonic()
    while True:
        item = endpoint.receive_item(_LOOK_EVERY_S)
        if item is None:
            is_overdue = time.monotonic() - answered > call.transport.timeout_s
            try:
                if _look_for_owner(call, endpoint, own, is_overdue=is_overdue):
                    answered = time.monotonic()
                continue
            except PeerLostError:
                # never before what has come is read: the last word of an owner that is gone is that the run is over
                item = endpoint.receive_item(0.0)
                if item is None:
                    raise
        if isinstance(item, LinkFault):
            raise PeerLostError(f"{OWNER}: {item.error}")
        order = parse_body(m.ORDERS, item.kind, item.body)
        if isinstance(order, m.EndOrder):
            return True
        reply, payload = answer(order, item.payload)
        endpoint.send_frame(OWNER, reply.kind, reply.model_dump(mode="json"), (payload,))
        answered = time.monotonic()


def _look_for_owner(call: OwnerCall, endpoint: Endpoint, own: str, *, is_overdue: bool) -> bool:
    """Return while the owner is there: whether it answers, and then counts this process in."""
    try:
        met = ask_peer_run(call.identity, OWNER, call.address, own, call.transport, _LOOK_EVERY_S)
    except PeerRefusedError as exc:
        raise PeerLostError(f"{OWNER}: {exc}") from exc
    except PeerLostError as exc:
        # who leaves costs the owner a round: one that listens and does not answer may be busy
        if is_overdue or isinstance(exc, PeerGoneError):
            raise
        return False
    if (met.run, met.calls_us) != (endpoint.session_name, endpoint.party_name):
        raise PeerLostError(f"{OWNER}: began another session")
    return True
