"""Workers in processes of their own, here or on other machines, behind mutual TLS and signed frames."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import FrameError, TransportError
from phalanx.security.crypto import Identity
from phalanx.security.mask import MaskedMessage, ProductMessage
from phalanx.security.mask.pads import MOST_ELEMENTS
from phalanx.split.masked.answers import AnswerSorter
from phalanx.split.masked.config import MaskedWorkerConfig
from phalanx.split.masked.messages import END, LOAD, MULTIPLY, load_parts, send, write_masked
from phalanx.transport import Endpoint, LocalWorkerProcesses, TransportConfig, joined_workers

_COMMAND = ("phalanx", "masked-worker")
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


def local_masked_workers(
    directory: Path,
    identities: Path,
    transport: TransportConfig,
    *,
    threads: int = 1,
    command: Sequence[str] = _COMMAND,
) -> LocalWorkerProcesses:
    """Return what starts a worker process for each name, for one machine with an enclave and an accelerator in it.

    Args:
        directory: Gets each worker's file and log.
        identities: Has a directory with certificate and keys for each name.
        transport: Deadlines and bounds; workers let the system choose their ports.
        threads: Threads of each.
        command: Module and arguments of a worker, without its file; another than the default is for drills only.
    """
    template = MaskedWorkerConfig(identity="", owner="", transport=transport.model_copy(update={"port": 0}))
    return LocalWorkerProcesses(directory, identities, template, command, threads)


@contextlib.contextmanager
def remote_workers(
    identity: Identity,
    names: Sequence[str],
    run: str,
    transport: TransportConfig,
    processes: LocalWorkerProcesses | None = None,
    announce: Callable[[str], None] = lambda address: None,
) -> Iterator[dict[str, RemoteWorker]]:
    """As `joined_workers`, of which it gives the ways to the workers."""
    with joined_workers(identity, names, run, transport, processes, announce=announce) as joined:
        answers = AnswerSorter(joined.endpoint)
        with contextlib.closing(answers):
            yield {
                name: RemoteWorker(name, joined.endpoint, answers, transport, _watch(name, processes)) for name in names
            }
            # a worker that is gone by now need not be told
            with contextlib.suppress(TransportError):
                for name in names:
                    joined.endpoint.send(name, END, {})
                joined.endpoint.flush(_FLUSH_S)


def _watch(name: str, processes: LocalWorkerProcesses | None) -> Callable[[], bool]:
    return _seems_alive if processes is None else partial(processes.is_alive, name)


def _seems_alive() -> bool:
    """True: of a process elsewhere nothing is known here."""
    return True
