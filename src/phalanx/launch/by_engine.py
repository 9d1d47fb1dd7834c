"""One way in for runs of a domain, whichever engine starts them."""

import typer

from phalanx.launch.domain import DomainLaunch
from phalanx.launch.domain_ray import describe_domain_ray, run_domain_on_ray
from phalanx.launch.domain_torchrun import check_nodes, describe_domain_torchrun, run_domain_on_torchrun
from phalanx.launch.torchrun import Nodes


def launch_domain(launch: DomainLaunch, engine: str, nodes: Nodes, address: str | None, *, dry_run: bool) -> int:
    """Run a domain on torchrun or on Ray.

    Args:
        engine: ``torchrun`` or ``ray``.
        nodes: Over which machines, for torchrun.
        address: Address of a running Ray cluster; None for one of its own.
        dry_run: Print what would be run; start nothing.

    Raises:
        ConfigError: Nothing was started, and why.
    """
    launch.check_launch()
    check_nodes(launch, nodes)
    on_torchrun = engine == "torchrun"
    if dry_run:
        lines = describe_domain_torchrun(launch, nodes) if on_torchrun else describe_domain_ray(launch, address)
        typer.echo("\n".join(lines))
        return 0
    return run_domain_on_torchrun(launch, nodes) if on_torchrun else run_domain_on_ray(launch, address)
