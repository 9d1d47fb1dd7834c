"""Launches on torchrun and Ray: engines place and restart the processes of a run; Phalanx says which runs where."""

from phalanx.launch.domain import (
    DomainLaunch as DomainLaunch,
    as_domain as as_domain,
    find_open_return as find_open_return,
    resumes_run as resumes_run,
    is_supervised_here as is_supervised_here,
)
from phalanx.launch.domain_local import supervise_domain as supervise_domain
from phalanx.launch.machine_check import check_machine as check_machine
from phalanx.launch.on_ray import describe_ray as describe_ray, run_on_ray as run_on_ray
from phalanx.launch.rank import is_rank as is_rank, run_rank as run_rank
from phalanx.launch.request import Launch as Launch
from phalanx.launch.torchrun import Nodes as Nodes, describe_torchrun as describe_torchrun, run_torchrun as run_torchrun
import typer
from phalanx.launch.domain_ray import describe_domain_ray, run_domain_on_ray
from phalanx.launch.domain_torchrun import check_nodes, describe_domain_torchrun, run_domain_on_torchrun


def launch_domain(launch: DomainLaunch, engine: str, nodes: Nodes, address: str | None, *, dry_run: bool) -> int:
    """Run a domain on torchrun or on Ray.

    Args:
        engine: ``torchrun`` or ``ray``.
        nodes: Over which machines, for torchrun.
        address: Address of a running Ray cluster; None for one of its own.
        dry_run: Print what would be run; start nothing.
    """
    launch.check_launch()
    check_nodes(launch, nodes)
    on_torchrun = engine == "torchrun"
    if dry_run:
        lines = describe_domain_torchrun(launch, nodes) if on_torchrun else describe_domain_ray(launch, address)
        typer.echo("\n".join(lines))
        return 0
    return run_domain_on_torchrun(launch, nodes) if on_torchrun else run_domain_on_ray(launch, address)
