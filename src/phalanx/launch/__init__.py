"""Launches on torchrun and Ray: engines place and restart the processes of a run; Phalanx says which runs where."""

from phalanx.launch.by_engine import launch_domain as launch_domain
from phalanx.launch.domain import (
    DomainLaunch as DomainLaunch,
    as_domain as as_domain,
    resumes_run as resumes_run,
    is_supervised_here as is_supervised_here,
)
from phalanx.launch.domain_local import supervise_domain as supervise_domain
from phalanx.launch.machine_check import check_machine as check_machine
from phalanx.launch.on_ray import describe_ray as describe_ray, run_on_ray as run_on_ray
from phalanx.launch.rank import is_rank as is_rank, run_rank as run_rank
from phalanx.launch.request import Launch as Launch
from phalanx.launch.torchrun import Nodes as Nodes, describe_torchrun as describe_torchrun, run_torchrun as run_torchrun
