"""Workers of rollouts as processes of this machine, or elsewhere, behind mutual TLS and signed frames."""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from phalanx.child import PythonProcess
from phalanx.config import dump_toml
from phalanx.errors import PeerLostError
from phalanx.rollouts.company import RolloutCompany
from phalanx.rollouts.config import RolloutCheck, RolloutWorkerConfig
from phalanx.rollouts.evidence import EvidenceDesk
from phalanx.rollouts.judgement import RewardRule
from phalanx.rollouts.share import CheckedShare
from phalanx.security.crypto import Identity
from phalanx.transport import Endpoint, GrpcWire, TransportConfig

_COMMAND = ("phalanx", "rollout-worker")
_LOOK_EVERY_S = 0.5
_FLUSH_S = 5.0


class LocalRolloutWorkers:
    """Child processes by worker name; a context manager that ends them all.

    Args:
        directory: Gets each worker's file and log.
        identities: Has a directory with certificate and keys for each name.
        template: What all workers' files say beside identity and owner.
        others: Module and arguments of single workers, by name, without their file; for drills only.
    """

    def __init__(
        self,
        directory: Path,
        identities: Path,
        template: RolloutWorkerConfig,
        others: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._directory, self._identities, self._template = directory, identities, template
        self._others = others or {}
        self._processes: dict[str, PythonProcess] = {}

    def start(self, names: Sequence[str], owner: str, owner_name: str) -> None:
        """Start one process for each name; their output goes to ``NAME.log``."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for name in names:
            identity = str((self._identities / name).resolve())
            config = self._template.model_copy(update={"identity": identity, "owner": owner, "owner_name": owner_name})
            path = self._directory / f"{name}.toml"
            path.write_text(dump_toml(config), encoding="utf-8")
            threads = {"OMP_NUM_THREADS": str(config.threads)}
            command = (*self._others.get(name, _COMMAND), str(path))
            self._processes[name] = PythonProcess(command, threads, self._directory / f"{name}.log")

    def is_alive(self, name: str) -> bool:
        """Whether a worker still runs."""
        return self._processes[name].poll() is None

    def last_output(self, name: str) -> str:
        """Return the last line of a worker's log, for an error message."""
        return self._processes[name].last_output()

    def close(self) -> None:
        """Give the workers, which have been told to end, a moment; then kill them."""
        for process in self._processes.values():
            process.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()


@contextlib.contextmanager
def rollout_company(
    identity: Identity,
    names: Sequence[str],
    run: str,
    directory: Path,
    check: RolloutCheck,
    *,
    transport: TransportConfig | None = None,
    processes: LocalRolloutWorkers | None = None,
    reward: RewardRule | None = None,
    announce: Callable[[str], None] = lambda address: None,
) -> Iterator[RolloutCompany]:
    """Start or await workers, let them write texts, and end them whatever happens.

    Args:
        identity: The owner, with a certificate of the authority that the workers' are of as well.
        names: The workers to wait for; no other party is let in.
        run: The run; each start is a session of its own, in which nothing of an earlier one can be replayed.
        directory: Where evidence goes.
        check: What is read again.
        transport: Where to listen, deadlines and bounds.
        processes: Starts local ones; left out, workers are started by hand on other machines.
        reward: What a text earns; needed where workers report rewards.
        announce: Told the address at which workers are awaited.

    Raises:
        PeerLostError: A worker did not come.
        CertificateError: The identity is unusable.
    """
    limits = transport or TransportConfig()
    wire = GrpcWire(identity, limits)
    with contextlib.ExitStack() as stack:
        stack.callback(wire.close)
        session = f"{run}-{secrets.token_hex(8)}"
        endpoint = stack.enter_context(Endpoint(identity, {}, session, wire, limits))
        announce(wire.address)
        if processes is not None:
            stack.enter_context(processes)
            processes.start(names, wire.address, identity.name)
        certificates = {identity.name: identity.certificate_pem.decode()}
        for name in names:
            certificates[name] = _let_in(name, wire, endpoint, processes, check.answer_timeout_s)
        desk = EvidenceDesk(directory, session, identity.authority_pem.decode(), certificates)
        share = CheckedShare(secrets.token_bytes(32), check.rate)
        company = RolloutCompany(endpoint, names, check, share, desk, reward)
        yield company
        company.close()
        with contextlib.suppress(PeerLostError):
            endpoint.flush(_FLUSH_S)
        if processes is not None:
            processes.close()


def _let_in(
    name: str, wire: GrpcWire, endpoint: Endpoint, processes: LocalRolloutWorkers | None, patience_s: float
) -> str:
    """Wait for a worker; returns its certificate."""
    deadline = time.monotonic() + patience_s
    while (joined := wire.wait_joined(name, _LOOK_EVERY_S)) is None:
        if processes is not None and not processes.is_alive(name):
            raise PeerLostError(f"{name}: ended before it joined: {processes.last_output(name)}")
        if time.monotonic() > deadline:
            raise PeerLostError(f"{name}: did not join within {patience_s:g} s; start it with its worker file")
    endpoint.add_peer(joined.peer, joined.address)
    return joined.certificate.decode()
