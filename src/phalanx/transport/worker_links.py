"""The workers of one owner: processes of this machine on a leash, a session that each joins, and a worker's end."""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from phalanx.access_gate import check_caller
from phalanx.child import PythonProcess
from phalanx.config import StrictModel, dump_toml
from phalanx.errors import PeerLostError, PeerRefusedError, TransportError
from phalanx.security.crypto import Identity, load_identity
from phalanx.transport.config import JoiningWorkerConfig, TransportConfig
from phalanx.transport.endpoint import Endpoint
from phalanx.transport.grpc_wire import GrpcWire, JoinedPeer, ask_peer_run
from phalanx.transport.inbox import CheckedFrame, LinkFault

_LOOK_EVERY_S = 0.5
_FLUSH_S = 5.0
_LISTEN_S = 1.0


class LocalWorkerProcesses:
    """Child processes by worker name; a context manager that ends them all.

    They run as their starter's user, so they can read its memory.

    Args:
        directory: Gets each worker's file and log.
        identities: Has a directory with certificate and keys for each name.
        template: Common part of all workers' files beside ``identity``, ``owner`` and ``owner_name``.
        command: Module and arguments of a worker, without its file.
        others: Module and arguments of single workers, by name, without their file; for drills only.
    """

    def __init__(
        self,
        directory: Path,
        identities: Path,
        template: StrictModel,
        command: Sequence[str],
        threads: int = 1,
        others: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._directory, self._identities, self._template = directory, identities, template
        self._command, self._threads, self._others = command, threads, others or {}
        self._processes: dict[str, PythonProcess] = {}

    def start_processes(self, names: Sequence[str], owner: str, owner_name: str) -> None:
        """Start one process for each name; their output goes to ``NAME.log``."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for name in names:
            identity = str((self._identities / name).resolve())
            config = self._template.model_copy(update={"identity": identity, "owner": owner, "owner_name": owner_name})
            path = self._directory / f"{name}.toml"
            path.write_text(dump_toml(config), encoding="utf-8")
            threads = {"OMP_NUM_THREADS": str(self._threads)}
            command = (*self._others.get(name, self._command), str(path))
            self._processes[name] = PythonProcess(command, threads, self._directory / f"{name}.log")

    def is_running(self, name: str) -> bool:
        """Whether a worker still runs."""
        return self._processes[name].poll() is None

    def process_id(self, name: str) -> int:
        """The process of a worker."""
        return self._processes[name].pid

    def last_log_line(self, name: str) -> str:
        """Return the last line of a worker's log, for an error message."""
        return self._processes[name].last_output()

    def close(self) -> None:
        """Give the workers, which have been told to end, a moment; then kill them."""
        for process in self._processes.values():
            process.end_or_kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()


@dataclass(frozen=True)
class OwnerSession:
    """The owner's end of a session that all its workers have joined.

    Attributes:
        endpoint: The owner's; it knows every worker.
        session: Session that every frame is signed for.
        certificates: Certificates of the owner and of each worker, by name.
    """

    endpoint: Endpoint
    session: str
    certificates: Mapping[str, str]


@contextlib.contextmanager
def joined_workers(
    identity: Identity,
    names: Sequence[str],
    run: str,
    transport: TransportConfig,
    processes: LocalWorkerProcesses | None,
    *,
    announce: Callable[[str], None] = lambda address: None,
    patience_s: float = 120.0,
    note_absent: Callable[[str, PeerLostError], None] | None = None,
) -> Iterator[OwnerSession]:
    """Start or await workers, give the session that they have joined, and end them whatever happens.

    Args:
        identity: The owner, with a certificate of the authority that the workers' are of as well.
        names: The workers to wait for; no other party is let in.
        run: The run; each start is a session of its own, in which nothing of an earlier one can be replayed.
        transport: Address to listen on, deadlines and bounds.
        processes: Starts local ones; left out, workers are started by hand on other machines.
        announce: Told the address at which workers are awaited.
        patience_s: Seconds that one worker may take to join.
        note_absent: Told of workers that are not waited for any longer; left out, one that is absent ends the session.

    Raises:
        PeerLostError: A worker did not join; with `note_absent`, none did.
    """
    wire = GrpcWire(identity, transport)

    def name_caller(certified: str, _begins: bool) -> str:
        if certified not in names:
            raise PeerRefusedError(f"{certified} is no party of this session; convicted and revoked ones stay out")
        return certified

    wire.name_of = name_caller
    if processes is None:
        wire.admit = check_caller
    with contextlib.ExitStack() as stack:
        stack.callback(wire.close)
        session = f"{run}-{secrets.token_hex(8)}"
        endpoint = stack.enter_context(Endpoint(identity, {}, session, wire, transport))
        announce(wire.address)
        if processes is not None:
            stack.enter_context(processes)
            processes.start_processes(names, wire.address, identity.name)
        certificates = {}
        for number, name in enumerate(names, 1):
            try:
                certificates[name] = _let_in(name, wire, endpoint, processes, patience_s)
            except PeerLostError as exc:
                if note_absent is None or (number == len(names) and not certificates):
                    raise
                # the others had as much time by now
                patience_s = 0.0
                note_absent(name, exc)
        yield OwnerSession(endpoint, session, {identity.name: identity.certificate_pem.decode(), **certificates})
        # a worker that is gone by now need not be told
        with contextlib.suppress(TransportError):
            endpoint.flush_frames(_FLUSH_S)
        if processes is not None:
            processes.close()


def _let_in(
    name: str, wire: GrpcWire, endpoint: Endpoint, processes: LocalWorkerProcesses | None, patience_s: float
) -> str:
    """Wait for a worker; returns its certificate."""
    deadline = time.monotonic() + patience_s
    while (joined := wire.wait_joined(name, _LOOK_EVERY_S)) is None:
        if processes is not None and not processes.is_running(name):
            raise PeerLostError(f"{name}: ended before it joined: {processes.last_log_line(name)}")
        if time.monotonic() > deadline:
            raise PeerLostError(f"{name}: did not join within {patience_s:g} s; start it with its worker file")
    endpoint.add_peer(joined.peer, joined.address)
    return joined.certificate.decode()


@dataclass(frozen=True)
class OwnerLink:
    """A worker's end of a session that it has joined.

    Attributes:
        owner: Party name of the owner.
        silence_s: After so long without a frame it looks whether the owner is still there.
        look: Asks the owner which session it serves.
    """

    endpoint: Endpoint
    owner: str
    silence_s: float
    ask_owner_run: Callable[[], str]

    def receive_frames(self) -> Iterator[CheckedFrame]:
        """Yield what arrives, for as long as the owner is there."""
        last = time.monotonic()
        while True:
            item = self.endpoint.receive_item(_LISTEN_S)
            if isinstance(item, LinkFault):
                raise PeerLostError(f"{self.owner}: {item.error}")
            if item is not None:
                yield item
                last = time.monotonic()
            elif time.monotonic() - last > self.silence_s:
                if self.ask_owner_run() != self.endpoint.session_name:
                    raise PeerLostError(f"{self.owner}: serves another session by now; start this worker anew")
                last = time.monotonic()


@contextlib.contextmanager
def join_owner(config: JoiningWorkerConfig) -> Iterator[OwnerLink]:
    """Look for the owner, and join its session."""
    identity, transport = load_identity(Path(config.identity)), config.transport
    wire = GrpcWire(identity, transport)
    with contextlib.ExitStack() as stack:
        stack.callback(wire.close)
        address = wire.address
        if config.advertise is not None:
            address = f"{config.advertise}:{address.rpartition(':')[2]}"

        def meet(patience_s: float, begins: bool) -> JoinedPeer:
            name, owner = config.owner_name, config.owner
            return ask_peer_run(identity, name, owner, address, transport, patience_s, begins=begins)

        met = meet(config.join_timeout_s, True)
        # known from the first moment on: the owner speaks first
        endpoint = stack.enter_context(Endpoint(identity, {met.peer.name: met.peer}, met.run, wire, transport))
        endpoint.add_peer(met.peer, config.owner)
        yield OwnerLink(endpoint, config.owner_name, transport.timeout_s, lambda: meet(transport.timeout_s, False).run)
