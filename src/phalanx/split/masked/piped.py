"""Masked workers of an enclave that reaches no network: each behind a pipe of its own, in a sandbox of its own.

The frames do not pass the process that has started both. They are signed all the same, as over any other wire, for
the enclave's pipe proves nothing about the process at its other end.
"""

import contextlib
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from phalanx.config import StrictModel
from phalanx.errors import FrameError, PeerLostError
from phalanx.security.crypto import Identity, load_identity, peer_from_certificate
from phalanx.security.mask import MaskedWorker
from phalanx.split.channel.frame_pipe import FramePipe, PipeWire
from phalanx.split.masked.answers import AnswerSorter
from phalanx.split.masked.messages import END
from phalanx.split.masked.remote import RemoteWorker
from phalanx.split.masked.serving import ProductService
from phalanx.transport import Endpoint, Handle, OwnerLink, TransportConfig

_FLUSH_S = 2.0
_LOOK_S = 5.0


class PipedWorkerConfig(StrictModel):
    """The config of a worker behind a pipe; no secret is in it.

    Attributes:
        identity: Directory with its certificate and keys.
        owner_certificate: PEM of the trusted side.
        session: Name of the session.
        device: As in `MaskedWorkerConfig`.
        transport: Deadlines and bounds.
    """

    identity: str
    owner_certificate: str
    session: str
    device: str = "cpu"
    transport: TransportConfig = TransportConfig()


class PipeWires:
    """One party's `Wire` over several pipes, with one party at the other end of each.

    Args:
        name: The party at this end.
        pipes: By the party at the other end.
    """

    address = "pipes"

    def __init__(self, name: str, pipes: Mapping[str, FramePipe]) -> None:
        self._wires: dict[str, PipeWire] = {other: pipe.wire(name) for other, pipe in pipes.items()}

    def serve(self, handle: Handle, run: str) -> None:
        """As `Wire` says."""
        for wire in self._wires.values():
            wire.serve(handle, run)

    def add_route(self, name: str, address: str) -> None:
        """Do nothing: each is at the end of its own pipe."""

    def deliver(self, receiver: str, raw: bytes, timeout_s: float) -> bytes:
        """As `Wire` says."""
        if receiver not in self._wires:
            raise FrameError(f"{receiver}: there is no pipe to it")
        return self._wires[receiver].deliver(receiver, raw, timeout_s)

    def close(self) -> None:
        """As `Wire` says; the pipes' makers close them."""


@contextlib.contextmanager
def piped_workers(
    identity: Identity,
    certificates: Mapping[str, str],
    ends: Mapping[str, socket.socket],
    session: str,
    transport: TransportConfig,
) -> Iterator[dict[str, RemoteWorker]]:
    """Give the ways to workers that another process has started, and tell them when it is over.

    Args:
        identity: The trusted side.
        certificates: PEM by worker.
        ends: This side's end of each one's pipe; closed at the end.
        session: Name of the session, the same as in the workers' files.
        transport: Deadlines and bounds.

    Raises:
        CertificateError: A certificate is not of the same authority.
    """
    with contextlib.ExitStack() as stack:
        pipes: dict[str, FramePipe] = {}
        for name, end in ends.items():
            pipes[name] = FramePipe(end, transport.max_frame_bytes)
            stack.callback(pipes[name].close)
        endpoint = stack.enter_context(Endpoint(identity, {}, session, PipeWires(identity.name, pipes), transport))
        for name, pem in certificates.items():
            endpoint.add_peer(peer_from_certificate(pem.encode("ascii"), identity.authority_pem, where=name))
        answers = AnswerSorter(endpoint)
        stack.callback(answers.close)
        yield {name: RemoteWorker(name, endpoint, answers, transport, pipes[name].is_open) for name in ends}
        # a worker that is gone by now need not be told
        with contextlib.suppress(PeerLostError):
            for name in ends:
                endpoint.send(name, END, {})
            endpoint.flush(_FLUSH_S)


def serve_pipe(config: PipedWorkerConfig, end: socket.socket) -> None:
    """Be a worker until the trusted side ends the session or is gone.

    Raises:
        PeerLostError: It is gone.
        CertificateError: This worker's own identity, or the trusted side's certificate, is unusable.
    """
    identity = load_identity(Path(config.identity))
    owner = peer_from_certificate(config.owner_certificate.encode("ascii"), identity.authority_pem, where="enclave")
    pipe = FramePipe(end, config.transport.max_frame_bytes)

    def look() -> str:
        if not pipe.is_open():
            raise PeerLostError(f"{owner.name}: its end of the pipe is closed")
        return config.session

    try:
        wire = pipe.wire(identity.name)
        with Endpoint(identity, {owner.name: owner}, config.session, wire, config.transport) as endpoint:
            ProductService(endpoint, MaskedWorker(config.device)).run(OwnerLink(endpoint, owner.name, _LOOK_S, look))
    finally:
        pipe.close()
