"""A rank's place inside a Ray actor: one process of ``phalanx train``, which ends with the actor."""

import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.launch.child import Child


@dataclass(frozen=True)
class ActorMachine:
    """The machine of an actor.

    Attributes:
        name: Name of the machine within its cluster.
        address: Address of the machine within its cluster.
    """

    name: str
    address: str


class RankHost:
    """A host that starts, watches and ends the process of one rank."""

    def __init__(self) -> None:
        self._child = Child()
        self._directory = tempfile.TemporaryDirectory(prefix="phalanx-rank-")

    def machine(self) -> ActorMachine:
        """Where this is."""
        import ray  # noqa: PLC0415 - an extra

        return ActorMachine(ray.get_runtime_context().get_node_id(), str(ray.util.get_node_ip_address()))

    def free_port(self) -> int:
        """Return a port that no process on this machine uses at the moment."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            port: int = listener.getsockname()[1]
        return port

    def start(self, run_file: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the rank.

        Args:
            run_file: Text of the run file; this machine need not have it.
            arguments: Arguments of ``phalanx train`` after the run file.
            environment: Its place among the others.
        """
        path = Path(self._directory.name) / "run.toml"
        path.write_text(run_file, encoding="utf-8")
        self._child.start_command(("train", str(path), *arguments), environment)

    def poll(self) -> int | None:
        """Exit code, None while it runs, negative when it was killed."""
        return self._child.poll()

    def ask_to_end(self) -> None:
        """Let it stop in good order."""
        self._child.ask_to_end()


def rank_environments(machines: Sequence[ActorMachine], port: int) -> list[dict[str, str]]:
    """What tells each rank its place; ranks in the order of their machines.

    Args:
        port: Free on the machine of rank 0, where all of them meet.

    Ray shows each actor the one GPU that it was given, so every rank's own is the first one.
    """
    names = [machine.name for machine in machines]
    together = len(set(names)) == 1
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(machines)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": str(names.count(machine.name)),
            "MASTER_ADDR": "127.0.0.1" if together else machines[0].address,
            "MASTER_PORT": str(port),
        }
        for rank, machine in enumerate(machines)
    ]
