"""The parties that call an enclave which they have not started, and the way of their frames into its sandbox."""

import threading
from collections.abc import Callable, Sequence

from phalanx.errors import PeerLostError, PeerRefusedError, TransportError, VerificationError
from phalanx.split.channel.frame_pipe import FramePipe
from phalanx.split.config import ENCLAVE
from phalanx.transport import GrpcWire, JoinedPeer, encode_refusal

_LOOK_EVERY_S = 0.2
_MAX_LINES = 1000


class Arrivals:
    """The arrivals of one session.

    A session ends when a process of a party that is there already calls anew: the one before it is gone, and with it
    the chains and keys that both had.

    Args:
        names: The parties of the run, named by their certificates; no other is let in.
        say: Takes one line; called from the wire's threads as well.
    """

    def __init__(self, names: Sequence[str], say: Callable[[str], None]) -> None:
        self._names, self._say = tuple(names), say
        self._came: set[str] = set()
        self._returned: str | None = None
        self._told_lines: set[str] = set()
        self._lock = threading.Lock()

    def name_of(self, certified: str, begins: bool) -> str | None:
        """Return a caller's name in this session; None where the next session is the one for it."""
        with self._lock:
            if certified not in self._names:
                self._tell_once(f"refused a caller: {certified} is not a party of this run")
                raise PeerRefusedError(
                    f"{certified}: is not a party of this run; split.remote_clients lists its clients"
                )
            if begins and certified in self._came:
                self._returned = certified
                return None
            if begins:
                self._came.add(certified)
                self._tell_once(f"{certified} has called")
            return certified

    def missing_parties(self) -> list[str]:
        """Return the parties that have not called."""
        with self._lock:
            return [name for name in self._names if name not in self._came]

    def check_returned(self) -> None:
        """Return while every party is the process that it was."""
        if self._returned is not None:
            raise PeerLostError(f"{self._returned}: has restarted, so this session is over; continue with --resume")

    def wait_for_all(self, wire: GrpcWire) -> dict[str, JoinedPeer]:
        """Wait, however long, until all have called."""
        joined_peers: dict[str, JoinedPeer] = {}
        while len(joined_peers) < len(self._names):
            for name in self._names:
                joined = wire.wait_joined(name, _LOOK_EVERY_S)
                self.check_returned()
                with self._lock:
                    has_begun = name in self._came
                if joined is not None and has_begun:
                    joined_peers[name] = joined
        return joined_peers

    def _tell_once(self, line: str) -> None:
        # a caller cannot fill a terminal
        if line not in self._told_lines and len(self._told_lines) < _MAX_LINES:
            self._told_lines.add(line)
            self._say(line)


class PipeRelay:
    """The way of signed frames between the network and an enclave behind a sandbox, which reaches one pipe only.

    Args:
        wire: Wire with the enclave's TLS key.
        timeout_s: Deadline of the enclave for one frame, in seconds.
    """

    def __init__(self, pipe: FramePipe, wire: GrpcWire, names: Sequence[str], timeout_s: float) -> None:
        self._pipe, self._wire, self._timeout_s = pipe, wire, timeout_s
        for name in names:
            pipe.serve_party(name, self._outward_handler(name))

    def pass_inward(self, raw: bytes | memoryview, tls_peer: str) -> bytes:
        """Pass a frame of a party, as TLS has proven it, to the enclave; return the answer."""
        return _answer_of(lambda: self._pipe.exchange_frame(tls_peer, ENCLAVE, bytes(raw), self._timeout_s))

    def _outward_handler(self, name: str) -> Callable[[bytes | memoryview, str], bytes]:
        def pass_on(raw: bytes | memoryview, sender: str) -> bytes:
            del sender
            return _answer_of(lambda: self._wire.deliver_frame(name, bytes(raw), self._timeout_s))

        return pass_on


def _answer_of(deliver: Callable[[], bytes]) -> bytes:
    """What the other side answers; where none comes, word of that, upon which a sender tries again."""
    try:
        return deliver()
    except PeerLostError as exc:
        # of this very class: it is the one that a sender may try again after
        return encode_refusal(PeerLostError(str(exc)))
    except (TransportError, VerificationError) as exc:
        return encode_refusal(exc)
