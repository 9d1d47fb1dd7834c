"""One command line for torchrun, with preparations and the work after it.

torchrun's own rendezvous unpickles its input, so a program that can write to it can run code in every process of the
launch. On one machine it therefore goes through a file in a private directory and nothing listens; several machines
must all be in the hands of one operator, on a network of their own.
"""

import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.config import digest_config
from phalanx.errors import ConfigError
from phalanx.launch.child import exit_code
from phalanx.launch.rendezvous import FileRendezvous, rendezvous_environment
from phalanx.launch.request import Launch
from phalanx.pipeline import OWNER

_ONE = "1"
_INTERRUPTED = 130
_SOMEWHERE = "PRIVATE_DIRECTORY"


@dataclass(frozen=True)
class Nodes:
    """The machines of one torchrun.

    Attributes:
        count: Value of torchrun's ``--nnodes``: a number, or ``MIN:MAX``.
        endpoint: Value of torchrun's ``--rdzv-endpoint``: ``host:port`` on a machine that stays, best the owner's.
    """

    count: str = _ONE
    endpoint: str | None = None

    @property
    def is_one(self) -> bool:
        """Whether everything runs on this machine."""
        return self.count in (_ONE, "1:1")

    def check_launch(self, launch: Launch) -> None:
        """Refuse what could not come about."""
        if self.is_one:
            return
        if self.endpoint is None:
            raise ConfigError(f"--nnodes {self.count}: add --rdzv-endpoint HOST:PORT, the rendezvous of the machines")
        if launch.is_on_loopback:
            raise ConfigError(
                f"--nnodes {self.count}: pipeline.transport.bind = {launch.run_config.pipeline.transport.bind!r} is "
                'reachable from its own machine only; set it to the address to listen on, or to "0.0.0.0"'
            )
        here = {part.name for part in launch.process_slots}
        if not launch.chosen and here == {OWNER, *launch.run_config.pipeline.remote_workers}:
            raise ConfigError(
                f"--nnodes {self.count}: this directory has the keys of all parties, as on a shared disk; name the "
                "parties of this machine with --party"
            )


def torchrun_command(launch: Launch, nodes: Nodes, directory: Path | None = None) -> tuple[list[str], dict[str, str]]:
    """What torchrun is called with, and its environment beyond this process's own.

    Args:
        directory: A private one, for a launch on one machine; None shows where its name would stand.
    """
    torchrun_arguments = ["--nnodes", nodes.count, "--nproc-per-node", str(len(launch.process_slots))]
    torchrun_arguments += ["--max-restarts", str(launch.restart_limit), "--rdzv-backend", "c10d"]
    torchrun_arguments += ["--rdzv-id", digest_config(launch.run_config)[:16]]
    environment: dict[str, str] = {}
    if nodes.is_one:
        home = Path(_SOMEWHERE) if directory is None else directory
        torchrun_arguments += ["--rdzv-endpoint", str(home / "rendezvous"), "--rdzv-conf", "store_type=file"]
        torchrun_arguments += ["--local-addr", "127.0.0.1"]
        # the store that torchrun would open for its processes listens on every interface
        environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **rendezvous_environment(home)}
    else:
        torchrun_arguments += ["--rdzv-endpoint", nodes.endpoint or ""]
    # a group that is started again must go on, and a run that was there before was refused already
    arguments = launch.launch_arguments() if launch.resume else (*launch.launch_arguments(), "--resume")
    return [*torchrun_arguments, "-m", "phalanx", "launch", *arguments], environment


def describe_torchrun(launch: Launch, nodes: Nodes) -> list[str]:
    """Lines that say what would be run here."""
    arguments, environment = torchrun_command(launch, nodes)
    settings = [f"{key}={shlex.quote(value)}" for key, value in environment.items()]
    command = shlex.join([sys.executable, "-m", "torch.distributed.run", *arguments])
    return [*describe_parts(launch), " ".join([*settings, command])]


def describe_parts(launch: Launch) -> list[str]:
    """One line for each process that an engine keeps here."""
    lines = []
    for part in launch.process_slots:
        then = f", then {', '.join(part.substitutes)}" if part.substitutes else ""
        lines.append(f"{part.name}{then}: keys in {launch.keys_directory / part.name}")
    return lines


@contextlib.contextmanager
def _set_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """Environment that torchrun and its processes inherit, taken back afterwards."""
    old = {key: os.environ.get(key) for key in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for key, value in old.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def run_torchrun(launch: Launch, nodes: Nodes) -> int:
    """Run torchrun in this process until it ends.

    Returns:
        The owner's exit code where it runs here, or that of the process that failed first.
    """
    with tempfile.TemporaryDirectory(prefix="phalanx-launch-") as directory:
        arguments, environment = torchrun_command(launch, nodes, Path(directory))
        return start_torchrun(arguments, environment) or FileRendezvous(Path(directory)).read_exit_code()


def start_torchrun(torchrun_arguments: list[str], environment: Mapping[str, str]) -> int:
    """Run torchrun in this process.

    Args:
        environment: Variables for it and its processes, beyond this process's own.

    Returns:
        0, or how the process ended that failed first.
    """
    # its processes, which import this module too, have no use for it
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.run import main  # noqa: PLC0415

    with _set_environment(environment):
        try:
            main(torchrun_arguments)
        except ChildFailedError as exc:
            return exit_code(exc.get_first_failure()[1].exitcode)
        except SignalException:
            return _INTERRUPTED
    return 0
