"""Workers in processes of their own, here or on other machines, behind mutual TLS and signed frames."""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import FrameError, PeerLostError, TransportError
from phalanx.security.crypto import Identity
from phalanx.security.mask import MaskedMessage, ProductMessage
from phalanx.security.mask.pads import MOST_ELEMENTS
from phalanx.split.masked.answers import AnswerSorter
from phalanx.split.masked.messages import END, LOAD, MULTIPLY, load_parts, send, write_masked
from phalanx.split.masked.process import LocalMaskedWorkers
from phalanx.transport import Endpoint, GrpcWire, TransportConfig

_JOIN_TIMEOUT_S = 120.0
_LOOK_EVERY_S = 0.5
_HEADER_BYTES = 4096
_FLUSH_S = 2.0


class RemoteWorker:
    """A `WorkerPort` to one party at an endpoint.

    Args:
        name: Party name of the worker.
        endpoint: The trusted side's.
        answers: Receives from that endpoint.
        limits: Deadlines and bounds.
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
        self.name, self.most_numbers = name, min(MOST_ELEMENTS, (limits.max_frame_bytes - _HEADER_BYTES) // 4)
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

    def load(self, product: ProductMessage, values: NDArray[np.int32]) -> None:
        """As `WorkerPort` says; the matrix travels in as many frames as it needs."""
        for body, payload in load_parts(product, values, self._limits.max_frame_bytes - _HEADER_BYTES):
            send(self._endpoint, self.name, LOAD, body, [payload])

    def multiply(self, requests: Sequence[MaskedMessage]) -> list[MaskedMessage]:
        """As `WorkerPort` says.

        Raises:
            FrameError: A request is larger than a frame, or an answer is malformed.
            PeerLostError: The worker is gone or silent.
        """
        self._answers.expect(self.name, requests)
        for request in requests:
            body, payload = write_masked(request)
            send(self._endpoint, self.name, MULTIPLY, body, [payload])
        answers = self._answers.collect(self.name, requests, self._limits.timeout_s, self._is_alive)
        for request, answer in zip(requests, answers, strict=True):
            if len(answer.values) != len(request.values):
                raise FrameError(
                    f"{self.name}: {request.product}: {len(answer.values)} rows came, expected {len(request.values)}"
                )
        return answers


@contextlib.contextmanager
def remote_workers(
    identity: Identity,
    names: Sequence[str],
    run: str,
    transport: TransportConfig,
    processes: LocalMaskedWorkers | None = None,
    announce: Callable[[str], None] = lambda address: None,
) -> Iterator[dict[str, RemoteWorker]]:
    """Start or await workers, give the ways to them, and end them whatever happens.

    Args:
        identity: The trusted side, with a certificate of the authority that the workers' are of as well.
        names: The workers to wait for; no other party is let in.
        run: The run; each start is a session of its own, in which nothing of an earlier one can be replayed.
        transport: Where to listen, deadlines and bounds.
        processes: Starts local ones; left out, workers are started by hand on other machines.
        announce: Told the address at which workers are awaited.

    Raises:
        PeerLostError: A worker did not come.
        CertificateError: The identity is unusable.
    """
    wire = GrpcWire(identity, transport)
    with contextlib.ExitStack() as stack:
        stack.callback(wire.close)
        session = f"{run}-{secrets.token_hex(8)}"
        endpoint = stack.enter_context(Endpoint(identity, {}, session, wire, transport))
        announce(wire.address)
        if processes is not None:
            stack.enter_context(processes)
            processes.start(names, wire.address, identity.name)
        for name in names:
            _let_in(name, wire, endpoint, processes)
        answers = AnswerSorter(endpoint)
        stack.callback(answers.close)
        yield {name: RemoteWorker(name, endpoint, answers, transport, _watch(name, processes)) for name in names}
        # a worker that is gone by now need not be told
        with contextlib.suppress(TransportError):
            for name in names:
                endpoint.send(name, END, {})
            endpoint.flush(_FLUSH_S)
        if processes is not None:
            processes.close()


def _watch(name: str, processes: LocalMaskedWorkers | None) -> Callable[[], bool]:
    return _seems_alive if processes is None else partial(processes.is_alive, name)


def _seems_alive() -> bool:
    """True: of a process elsewhere nothing is known here."""
    return True


def _let_in(name: str, wire: GrpcWire, endpoint: Endpoint, processes: LocalMaskedWorkers | None) -> None:
    deadline = time.monotonic() + _JOIN_TIMEOUT_S
    while (joined := wire.wait_joined(name, _LOOK_EVERY_S)) is None:
        if processes is not None and not processes.is_alive(name):
            raise PeerLostError(f"{name}: ended before it joined: {processes.last_output(name)}")
        if time.monotonic() > deadline:
            raise PeerLostError(f"{name}: did not join within {_JOIN_TIMEOUT_S:g} s; start it with its worker file")
    endpoint.add_peer(joined.peer, joined.address)
