"""Workers of masked mode behind wires: in processes of their own behind mutual TLS, or in sandboxes with one pipe."""

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.config import StrictModel
from phalanx.errors import FrameError, PeerLostError, TransportError
from phalanx.security.crypto import Identity, load_identity, peer_from_certificate
from phalanx.security.mask import MaskedMessage, MaskedWorker, ProductMessage
from phalanx.split.channel.frame_pipe import FramePipe, PipeWire
from phalanx.split.masked.answers import AnswerSorter
from phalanx.split.masked.config import MaskedWorkerConfig
from phalanx.split.masked.messages import (
    END,
    HEADER_BYTES,
    LOAD,
    MULTIPLY,
    load_parts,
    numbers_of_frame,
    send_unreceipted,
    write_masked,
)
from phalanx.split.masked.serving import ProductService
from phalanx.transport import Endpoint, Handle, LocalWorkerProcesses, OwnerLink, TransportConfig, joined_workers

_COMMAND = ("phalanx", "masked-worker")
_FLUSH_S = 2.0


class RemoteWorker:
    """A `WorkerPort` to one party at an endpoint.

    Args:
        is_alive: Whether its process still runs, as far as that is known here.
    """

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        answers: AnswerSorter,
        limits: TransportConfig,
        is_alive: Callable[[], bool] | None = None,
    ) -> None:
        self.name, self.max_numbers = name, numbers_of_frame(limits)
        self._endpoint, self._answers, self._limits = endpoint, answers, limits
        self._is_alive = is_alive or _seems_alive

    @property
    def bytes_sent(self) -> int:
        """Bytes of the frames that the worker has taken."""
        return self._endpoint.bytes_sent.get(self.name, 0)

    @property
    def bytes_received(self) -> int:
        """Bytes of the worker's frames."""
        return self._endpoint.bytes_received.get(self.name, 0)

    def load_matrix(self, product: ProductMessage, values: NDArray[np.int32]) -> None:
        """As `WorkerPort` says; the matrix travels in as many frames as it needs."""
        for body, payload in load_parts(product, values, self._limits.max_frame_bytes - HEADER_BYTES):
            send_unreceipted(self._endpoint, self.name, LOAD, body, [payload])

    def multiply_masked(self, requests: Sequence[MaskedMessage]) -> list[MaskedMessage]:
        """As `WorkerPort` says."""
        self._answers.expect_answers(self.name, requests)
        for request in requests:
            body, payload = write_masked(request)
            send_unreceipted(self._endpoint, self.name, MULTIPLY, body, [payload])
        answers = self._answers.collect_answers(self.name, requests, self._limits.timeout_s, self._is_alive)
        for request, answer in zip(requests, answers, strict=True):
            if len(answer.values) != len(request.values):
                raise FrameError(
                    f"{self.name}: {request.product}: {len(answer.values)} rows came, expected {len(request.values)}"
                )
        return answers


def local_masked_workers(
    directory: Path,
    identities: Path,
    transport: TransportConfig,
    *,
    threads: int = 1,
) -> LocalWorkerProcesses:
    """Return what starts a worker process for each name, for one machine with an enclave and an accelerator in it.

    Args:
        directory: Gets each worker's file and log.
        identities: Has a directory with certificate and keys for each name.
        transport: Deadlines and bounds; workers let the system choose their ports.
    """
    template = MaskedWorkerConfig(identity="", owner="", transport=transport.model_copy(update={"port": 0}))
    return LocalWorkerProcesses(directory, identities, template, _COMMAND, threads)


@contextlib.contextmanager
def remote_workers(
    identity: Identity,
    names: Sequence[str],
    run: str,
    transport: TransportConfig,
    processes: LocalWorkerProcesses | None = None,
) -> Iterator[dict[str, RemoteWorker]]:
    """As `joined_workers`, of which it gives the ways to the workers."""
    with joined_workers(identity, names, run, transport, processes) as joined:
        answers = AnswerSorter(joined.endpoint)
        with contextlib.closing(answers):
            yield {
                name: RemoteWorker(name, joined.endpoint, answers, transport, _liveness_check(name, processes))
                for name in names
            }
            # a worker that is gone by now need not be told
            with contextlib.suppress(TransportError):
                for name in names:
                    joined.endpoint.send_frame(name, END, {})
                joined.endpoint.flush_frames(_FLUSH_S)


def _liveness_check(name: str, processes: LocalWorkerProcesses | None) -> Callable[[], bool]:
    return _seems_alive if processes is None else partial(processes.is_running, name)


def _seems_alive() -> bool:
    """True: of a process elsewhere nothing is known here."""
    return True


_LOOK_S = 5.0


class PipedWorkerConfig(StrictModel):
    """The config of a worker behind a pipe; no secret is in it.

    Attributes:
        identity: Directory with its certificate and keys.
        owner_certificate: PEM of the trusted side.
        device: Device; see `MaskedWorkerConfig`.
    """

    identity: str
    owner_certificate: str
    session: str
    device: str = "cpu"
    transport: TransportConfig = TransportConfig()


class PipeWires:
    """One party's `Wire` over several pipes, with one party at the other end of each."""

    address = "pipes"

    def __init__(self, name: str, pipes: Mapping[str, FramePipe]) -> None:
        self._wires: dict[str, PipeWire] = {other: pipe.open_wire(name) for other, pipe in pipes.items()}

    def serve_frames(self, handle: Handle, run: str) -> None:
        """As `Wire` says."""
        for wire in self._wires.values():
            wire.serve_frames(handle, run)

    def add_route(self, name: str, address: str) -> None:
        """Do nothing: each is at the end of its own pipe."""

    def deliver_frame(self, receiver: str, raw: bytes, timeout_s: float) -> bytes:
        """As `Wire` says."""
        if receiver not in self._wires:
            raise FrameError(f"{receiver}: there is no pipe to it")
        return self._wires[receiver].deliver_frame(receiver, raw, timeout_s)

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
        ends: This side's end of each one's pipe; closed at the end.
        session: Name of the session, the same as in the workers' files.
    """
    with contextlib.ExitStack() as stack:
        pipes: dict[str, FramePipe] = {}
        for name, socket_end in ends.items():
            pipes[name] = FramePipe(socket_end, transport.max_frame_bytes)
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
                endpoint.send_frame(name, END, {})
            endpoint.flush_frames(_FLUSH_S)


def serve_pipe(config: PipedWorkerConfig, end: socket.socket) -> None:
    """Be a worker until the trusted side ends the session or is gone."""
    identity = load_identity(Path(config.identity))
    owner = peer_from_certificate(config.owner_certificate.encode("ascii"), identity.authority_pem, where="enclave")
    pipe = FramePipe(end, config.transport.max_frame_bytes)

    def look() -> str:
        if not pipe.is_open():
            raise PeerLostError(f"{owner.name}: its end of the pipe is closed")
        return config.session

    try:
        wire = pipe.open_wire(identity.name)
        with Endpoint(identity, {owner.name: owner}, config.session, wire, config.transport) as endpoint:
            worker = MaskedWorker(config.device, numbers_of_frame(config.transport))
            ProductService(endpoint, worker).serve_link(OwnerLink(endpoint, owner.name, _LOOK_S, look))
    finally:
        pipe.close()
