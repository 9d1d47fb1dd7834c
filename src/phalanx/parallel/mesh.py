"""Where this rank stands among all others: one DeviceMesh with the axes pp, dp, cp and tp."""

from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.parallel.config import ParallelConfig

_AXES = ("pp", "dp", "cp", "tp")
_COPIES = "copies"


@dataclass(frozen=True)
class Domain:
    """One rank's place and groups; ranks count along tp first, then cp, dp and pp.

    Attributes:
        config: The layout.
        device: Where this rank computes.
        pp: Coordinate along the pipeline; `dp`, `cp` and `tp` likewise.
        copy_mesh: Mesh of the dp * cp ranks that have the same parameters.
        copies: Their group.
        tensors: Group of the tensor parallel ranks.
        context: Group of the context parallel ranks.
        pipeline: Group of the pipeline's ranks.
        ends: Group of the pipeline's first and last rank, where this one is among them.
    """

    config: ParallelConfig
    device: torch.device
    pp: int
    dp: int
    cp: int
    tp: int
    copy_mesh: DeviceMesh
    copies: dist.ProcessGroup
    tensors: dist.ProcessGroup
    context: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    ends: dist.ProcessGroup | None

    @property
    def copy(self) -> int:
        """Which of the copies this rank has."""
        return self.dp * self.config.cp + self.cp

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for its place in the pipeline."""
        return self.copy == 0 and self.tp == 0

    def leader_of(self, pp: int) -> int:
        """Global rank of the one that speaks for a place in the pipeline."""
        config = self.config
        return pp * config.copies * config.tp

    def peer(self, pp: int) -> int:
        """Global rank of the one that has this rank's coordinates at another place in the pipeline."""
        config = self.config
        return self.leader_of(pp) + self.copy * config.tp + self.tp


def open_domain(config: ParallelConfig, device: torch.device) -> Domain:
    """Make the mesh and its groups; every rank of the default group calls this.

    Args:
        config: Its `world` is the size of the default group.
        device: Where this rank computes.
    """
    sizes = tuple(getattr(config, axis) for axis in _AXES)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=_AXES)
    copy_mesh = mesh["dp", "cp"]._flatten(_COPIES)
    places = {axis: mesh.get_local_rank(axis) for axis in _AXES}
    return Domain(
        config=config,
        device=device,
        **places,
        copy_mesh=copy_mesh,
        copies=copy_mesh.get_group(),
        tensors=mesh.get_group("tp"),
        context=mesh.get_group("cp"),
        pipeline=mesh.get_group("pp"),
        ends=_ends(config),
    )


def _ends(config: ParallelConfig) -> dist.ProcessGroup | None:
    """Groups of first and last pipeline ranks; all ranks make all of them, in one order."""
    if config.pp == 1:
        return None
    mine: dist.ProcessGroup | None = None
    across = config.copies * config.tp
    for first in range(across):
        ranks = [first, (config.pp - 1) * across + first]
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine
