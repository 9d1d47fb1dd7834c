"""Engines that place and restart the processes of one run file; Phalanx only says who runs where."""

from phalanx.launch.on_ray import describe_ray, run_on_ray
from phalanx.launch.rank import is_rank, run_rank
from phalanx.launch.request import Launch
from phalanx.launch.torchrun import Nodes, describe_torchrun, run_torchrun

__all__ = ["Launch", "Nodes", "describe_ray", "describe_torchrun", "is_rank", "run_on_ray", "run_rank", "run_torchrun"]
