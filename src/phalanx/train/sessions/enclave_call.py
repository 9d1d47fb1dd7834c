"""A call of an enclave that runs elsewhere: the way to it, its session, and a look now and then whether it goes on."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from phalanx.errors import PeerLostError, PeerRefusedError
from phalanx.security.crypto import Identity, Peer
from phalanx.split import ENCLAVE
from phalanx.telemetry import MissingNotice
from phalanx.transport import Endpoint, GrpcWire, JoinedPeer, TransportConfig, ask_peer_run

_LOOK_EVERY_S = 5.0


@dataclass(frozen=True)
class EnclaveCall:
    """The caller, and where the enclave is.

    Attributes:
        enclave: ``host:port``.
        transport: Listening address of the caller, deadlines and bounds.
        patience_s: Seconds to look for an enclave that does not answer.
        advertise: Host under which the enclave calls back; None where nobody can, as behind a router that translates
            addresses: the caller dials out, and the enclave's frames come on that stream.
        stacks_for: The one party that may ask for the stacks of the caller; None for nobody.
    """

    identity: Identity
    enclave: str
    transport: TransportConfig
    patience_s: float
    advertise: str | None = None
    say: Callable[[str], None] = lambda line: None
    stacks_for: str | None = None


@dataclass(frozen=True)
class CalledEnclave:
    """An enclave that has answered.

    Attributes:
        endpoint: The caller's end in that session.
        look: Asks the enclave every few seconds at most whether the session goes on; raises if it does not.
    """

    peer: Peer
    certificate: bytes
    session: str
    endpoint: Endpoint
    look: Callable[[], None]


@contextlib.contextmanager
def call_enclave(call: EnclaveCall, expected: Peer | None = None) -> Iterator[CalledEnclave]:
    """Call the enclave as a process that begins, and open this side's end of its session.

    Args:
        expected: The enclave, where its certificate is here already; None where the authority's word is enough.

    Raises:
        PeerRefusedError: It is another party, or does not let this one in.
    """
    wire = GrpcWire(call.identity, call.transport, stacks_for=call.stacks_for)
    with contextlib.ExitStack() as stack:
        stack.callback(wire.close)
        address = advertised_address(wire.address, call)
        met = _first_answer(call, address)
        if expected is not None and met.peer != expected:
            raise PeerRefusedError(
                f"{call.enclave}: its key differs from the enclave's certificate here; sign the request of the "
                "intended enclave, and no other"
            )
        # known before the first frame of it can come
        peers = {met.peer.name: met.peer}
        endpoint = stack.enter_context(Endpoint(call.identity, peers, met.run, wire, call.transport))
        endpoint.add_peer(met.peer, call.enclave)
        if not address:
            wire.collect_frames(met.peer.name)
        watch = _SessionWatch(call, address, met)
        yield CalledEnclave(met.peer, met.certificate, met.run, endpoint, watch.check_session)


def _first_answer(call: EnclaveCall, address: str) -> JoinedPeer:
    """Call until the enclave answers, and say meanwhile that it does not."""
    deadline = time.monotonic() + call.patience_s
    notice = MissingNotice(call.say, call.patience_s, (f"{ENCLAVE} at {call.enclave}",))
    while True:
        patience_s = min(_LOOK_EVERY_S, max(0.0, deadline - time.monotonic()))
        try:
            return ask_peer_run(call.identity, ENCLAVE, call.enclave, address, call.transport, patience_s, begins=True)
        except PeerLostError:
            if time.monotonic() >= deadline:
                raise
        notice.waits_for((f"{ENCLAVE} at {call.enclave}",))


def advertised_address(bound: str, call: EnclaveCall) -> str:
    """Return ``host:port`` at which the enclave calls back; empty where its frames come on the caller's own stream."""
    if call.advertise is None:
        return ""
    host = f"[{call.advertise}]" if ":" in call.advertise else call.advertise
    return f"{host}:{bound.rpartition(':')[2]}"


class _SessionWatch:
    """Looks whether the enclave is there, and still in the session that was called."""

    def __init__(self, call: EnclaveCall, address: str, met: JoinedPeer) -> None:
        self._call, self._address, self._session = call, address, met.run
        self._next = time.monotonic() + _LOOK_EVERY_S
        self._silent_since: float | None = None
        self._notice = MissingNotice(call.say, call.patience_s)
        self._notice.waits_for(met.awaited)

    def check_session(self) -> None:
        """Ask the enclave for its session, at most once in `_LOOK_EVERY_S`.

        Raises:
            PeerLostError: The enclave has begun another session, or has been silent for as long as a frame may be.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LOOK_EVERY_S
        call = self._call
        try:
            met = ask_peer_run(call.identity, ENCLAVE, call.enclave, self._address, call.transport, _LOOK_EVERY_S)
        except PeerLostError as exc:
            self._silent_since = self._silent_since or now
            if now - self._silent_since >= call.transport.timeout_s:
                raise PeerLostError(f"the enclave at {call.enclave} is lost: {exc}") from exc
            return
        self._silent_since = None
        self._notice.waits_for(met.awaited)
        if met.run != self._session:
            raise PeerLostError(f"the enclave at {call.enclave} began another session; continue with --resume")
