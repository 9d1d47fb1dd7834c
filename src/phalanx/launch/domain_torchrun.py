"""A domain's run on torchrun: one command line, with what its restarts need.

torchrun shares the store of its rendezvous with the ranks unless it is told not to, and a rank that is started again
then reads the addresses of dead ranks. Here it is told not to.
"""

import shlex
import sys
import tempfile
from pathlib import Path

from phalanx.config import digest_config
from phalanx.errors import ConfigError
from phalanx.launch.domain import DomainLaunch, rank_environment
from phalanx.launch.torchrun import Nodes, start_torchrun
from phalanx.parallel.groups.network import check_private, own_address, resolve_host
from phalanx.parallel.groups.rank_env import MEETINGS

_SOMEWHERE = "PRIVATE_DIRECTORY"
_LAST_CALL_S = 10
"""How long machines wait for more of them than they need at least."""


def ranks_per_machine(launch: DomainLaunch, nodes: Nodes) -> int:
    """How many ranks each machine starts."""
    if nodes.is_one:
        return launch.rank_count
    fewest, _, max_nodes = nodes.count.partition(":")
    config = launch.parallel_config
    ranks = config.max_dp_copies * config.ranks_per_copy if max_nodes else config.num_ranks
    machines = int(max_nodes or fewest)
    if ranks % machines:
        raise ConfigError(
            f"--nnodes {nodes.count}: {ranks} ranks cannot be divided equally among {machines} machines; change "
            "parallel.dp, or max_dp with a variable number of machines"
        )
    return ranks // machines


def check_nodes(launch: DomainLaunch, nodes: Nodes) -> None:
    """Refuse what could not come about, or would be open to a public network."""
    if nodes.is_one:
        return
    if nodes.endpoint is None:
        raise ConfigError(f"--nnodes {nodes.count}: add --rdzv-endpoint HOST:PORT, the rendezvous of the machines")
    if not all(part.isdecimal() and int(part) for part in nodes.count.split(":")):
        raise ConfigError(f"--nnodes {nodes.count}: expected a number, or MIN:MAX")
    host = _endpoint_host(nodes)
    check_private(resolve_host(host), f"--rdzv-endpoint {host}", unsafe=launch.parallel_config.unsafe_public_network)
    ranks_per_machine(launch, nodes)


def domain_command(
    launch: DomainLaunch, nodes: Nodes, directory: Path | None = None
) -> tuple[list[str], dict[str, str]]:
    """What torchrun is called with, and its environment beyond this process's own.

    Args:
        directory: A private one, for a launch on one machine; None shows where its name would stand.
    """
    arguments = ["--nnodes", nodes.count, "--nproc-per-node", str(ranks_per_machine(launch, nodes))]
    arguments += ["--max-restarts", str(launch.restart_limit), "--rdzv-backend", "c10d"]
    arguments += ["--rdzv-id", digest_config(launch.run_config)[:16]]
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **rank_environment(go_on=True)}
    if nodes.is_one:
        home = Path(_SOMEWHERE) if directory is None else directory
        arguments += ["--rdzv-endpoint", str(home / "rendezvous"), "--rdzv-conf", "store_type=file"]
        arguments += ["--local-addr", "127.0.0.1"]
        environment[MEETINGS] = str(home)
    else:
        arguments += ["--rdzv-endpoint", nodes.endpoint or "", "--rdzv-conf", f"last_call_timeout={_LAST_CALL_S}"]
        # what torchrun would find out for itself is the address of the machine's name, which may be a public one
        arguments += ["--local-addr", own_address(_endpoint_host(nodes))]
    return [*arguments, "-m", "phalanx", "train", *launch.train_arguments()], environment


def describe_domain_torchrun(launch: DomainLaunch, nodes: Nodes) -> list[str]:
    """Lines that say what would be run here."""
    arguments, environment = domain_command(launch, nodes)
    settings = [f"{key}={shlex.quote(value)}" for key, value in environment.items()]
    command = shlex.join([sys.executable, "-m", "torch.distributed.run", *arguments])
    return [f"{launch.parallel_config.planned_layout}: {launch.rank_count} ranks", " ".join([*settings, command])]


def run_domain_on_torchrun(launch: DomainLaunch, nodes: Nodes) -> int:
    """Run torchrun in this process until it ends.

    Returns:
        0, or how the rank ended that failed first in the last start.
    """
    with tempfile.TemporaryDirectory(prefix="phalanx-launch-") as directory:
        return start_torchrun(*domain_command(launch, nodes, Path(directory)))


def _endpoint_host(nodes: Nodes) -> str:
    return (nodes.endpoint or "").rpartition(":")[0].strip("[]")
