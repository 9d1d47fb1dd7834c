"""Launches on torchrun and Ray: engines place and restart the processes of a run; Phalanx says which runs where."""

from phalanx.launch.by_engine import launch_domain
from phalanx.launch.domain import DomainLaunch, as_domain, goes_on, is_kept_here
from phalanx.launch.domain_local import keep_domain
from phalanx.launch.machine_check import check_machine
from phalanx.launch.on_ray import describe_ray, run_on_ray
from phalanx.launch.rank import is_rank, run_rank
from phalanx.launch.request import Launch
from phalanx.launch.torchrun import Nodes, describe_torchrun, run_torchrun

__all__ = [
    "DomainLaunch",
    "Launch",
    "Nodes",
    "as_domain",
    "check_machine",
    "describe_ray",
    "describe_torchrun",
    "goes_on",
    "is_kept_here",
    "is_rank",
    "keep_domain",
    "launch_domain",
    "run_on_ray",
    "run_rank",
    "run_torchrun",
]
