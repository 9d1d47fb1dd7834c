"""The mesh of ranks and this rank's place in it: one DeviceMesh with the axes pp, island, replica, dp, cp and tp."""

from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.parallel.config import ParallelConfig

_COPIES = "copies"


@dataclass(frozen=True)
class Domain:
    """One rank's place and groups; ranks count along tp first, then cp, dp and pp.

    Data parallel copies count along copies that share first, then groups that are replicas of each other, then islands.

    Attributes:
        pp: Coordinate along the pipeline; `dp`, `cp` and `tp` likewise.
        replica: Number of this rank's sharing group in the island.
        copy_mesh: Mesh of the ranks that share what ZeRO shares; with replicas, groups by ranks of a group.
        copies: Group of the island's ranks that have the same parameters.
        islands: Group of the ranks that have this rank's place on all islands; None where there is one.
        ends: Group of the pipeline's first and last rank, where this one is among them.
    """

    config: ParallelConfig
    device: torch.device
    pp: int
    dp: int
    cp: int
    tp: int
    island: int
    replica: int
    copy_mesh: DeviceMesh
    copies: dist.ProcessGroup
    islands: dist.ProcessGroup | None
    tensors: dist.ProcessGroup
    context: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    ends: dist.ProcessGroup | None

    @property
    def copy_index(self) -> int:
        """Number of this rank's copy among all copies."""
        return self.dp * self.config.cp + self.cp

    @property
    def island_copy_index(self) -> int:
        """Number of this rank's copy on its island."""
        return self.copy_index % self.config.copies_per_island

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for its island at its place in the pipeline."""
        return self.island_copy_index == 0 and self.tp == 0

    def leader_of(self, pp: int, island: int = 0) -> int:
        """Return the global rank of the speaker for a place in the pipeline."""
        config = self.config
        return (pp * config.num_copies + island * config.copies_per_island) * config.tp

    def peer_rank(self, pp: int) -> int:
        """Return the global rank with this rank's coordinates at another place in the pipeline."""
        config = self.config
        return self.leader_of(pp) + self.copy_index * config.tp + self.tp


def open_domain(config: ParallelConfig, device: torch.device) -> Domain:
    """Make the mesh and its groups; every rank of the default group calls this."""
    sizes = _axis_sizes(config)
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    joined = tuple(axis for axis in ("replica", "dp", "cp") if axis in sizes)
    copy_mesh = mesh[joined]._flatten(_COPIES)
    places = dict.fromkeys(("island", "replica"), 0) | {axis: mesh.get_local_rank(axis) for axis in sizes}
    # whose rows: counted over all islands and groups
    places["dp"] += (places["island"] * config.replicas + places["replica"]) * sizes["dp"]
    return Domain(
        config=config,
        device=device,
        **places,
        copy_mesh=copy_mesh if config.replicas == 1 else _hybrid_mesh(config, device),
        copies=copy_mesh.get_group(),
        islands=mesh.get_group("island") if config.num_islands > 1 else None,
        tensors=mesh.get_group("tp"),
        context=mesh.get_group("cp"),
        pipeline=mesh.get_group("pp"),
        ends=_end_groups(config),
    )


def _axis_sizes(config: ParallelConfig) -> dict[str, int]:
    """The axes, slowest first; islands and replicas are parts of dp, and axes only where there are several."""
    parts = {"island": config.num_islands, "replica": config.replicas}
    sizes = {"pp": config.pp, **{axis: size for axis, size in parts.items() if size > 1}}
    sizes["dp"] = config.dp // (config.num_islands * config.replicas)
    return {**sizes, "cp": config.cp, "tp": config.tp}


def _hybrid_mesh(config: ParallelConfig, device: torch.device) -> DeviceMesh:
    """Groups by ranks of a group: a flattened axis cannot be one of two that are taken from a mesh."""
    shards = config.copies_per_island // config.replicas
    sizes = (config.pp * config.num_islands, config.replicas, shards, config.tp)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("rest", "replicas", "shards", "tensors"))
    return mesh["replicas", "shards"]


def _end_groups(config: ParallelConfig) -> dist.ProcessGroup | None:
    """Groups of first and last pipeline ranks; all ranks make all of them, in one order."""
    if config.pp == 1:
        return None
    mine: dist.ProcessGroup | None = None
    across = config.num_copies * config.tp
    for first in range(across):
        ranks = [first, (config.pp - 1) * across + first]
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine
