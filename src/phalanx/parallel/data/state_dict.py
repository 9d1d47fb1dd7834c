"""The state of all ranks by name: brought together for a checkpoint, and spread from one, whatever the layout."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from phalanx.models import ModelSource, SlicedAdapter, StageSpec, trained_shapes
from phalanx.optimizers import OptimizerConfig, moment_names, moment_shapes
from phalanx.parallel.data.diloco import MOMENTUM, RESIDUAL, OuterStep
from phalanx.parallel.data.parameters import RankParameter, fill_parameter, group_by_name, join_parameter
from phalanx.parallel.data.update import RankOptimizer
from phalanx.parallel.groups.mesh import Domain
from phalanx.planner.model.optimizers import is_in_bytes

WEIGHT = "weight"

Catalogue = list[list[tuple[str, tuple[int, ...]]]]
"""Names and shapes of what is trained, by stage."""


def parameter_catalogue(source: ModelSource, specs: Sequence[StageSpec], adapter: SlicedAdapter | None) -> Catalogue:
    """Return names and shapes of all trained parameters, by stage; a tied head is the first stage's embedding."""
    return [list(trained_shapes(source.hub_config, adapter, spec).items()) for spec in specs]


@dataclass(frozen=True)
class _StateEntry:
    """One tensor of a stage's state; state that every island has comes from the first."""

    kind: str
    name: str
    shape: tuple[int, ...]
    island: int = 0

    def empty_tensor(self) -> Tensor:
        """Memory for it."""
        return torch.empty(self.shape, dtype=state_dtype(self.state_key))

    @property
    def state_key(self) -> str:
        suffix = f"@{self.island}" if self.island else ""
        return f"{self.kind}{suffix}/{self.name}"


def state_dtype(key: str) -> torch.dtype:
    """Return the type of a tensor of the state by its key."""
    return torch.uint8 if is_in_bytes(key.partition("/")[0].partition("@")[0]) else torch.float32


def fallback_key(key: str, known: Mapping[str, object]) -> str | None:
    """Return the name to read in the place of a tensor that a checkpoint lacks since its run has other islands.

    Returns:
        The name to read; None for zeros.
    """
    if key in known:
        return key
    kind, _, name = key.partition("/")
    kind = kind.partition("@")[0]
    # moments of an island that was not there: those of the first
    return None if kind in (MOMENTUM, RESIDUAL) else f"{kind}/{name}"


class StateGatherer:
    """A gatherer of the state: it moves one stage at a time between the ranks and rank 0; all ranks call it together.

    Args:
        stages: Names and shapes from `parameter_catalogue`.
        outer: Outer step of islands; None without islands.
    """

    def __init__(
        self,
        stages: Catalogue,
        held: Sequence[RankParameter],
        update: RankOptimizer,
        outer: OuterStep | None,
        domain: Domain,
        config: OptimizerConfig,
    ) -> None:
        self._stages = stages
        self._held = held
        self._update = update
        self._outer = outer
        self._domain = domain
        self._kind = config.kind

    def stage_tensor_names(self, stage: int) -> list[str]:
        """Names of a stage's tensors."""
        return [entry.state_key for entry in self._state_entries(stage)]

    def stage_catalogues(self) -> Catalogue:
        """Names and whole shapes of the tensors of each stage, as `gather_stage` returns them."""
        return [
            [(entry.state_key, entry.shape) for entry in self._state_entries(stage)]
            for stage in range(len(self._stages))
        ]

    def held_tensors(self) -> Iterator[tuple[int, RankParameter, Tensor]]:
        """Yield this rank's part of each tensor, with its catalogue number; shared state is on the first island."""
        mine = group_by_name([entry for entry in self._held if not entry.is_second])
        entries = (entry for stage in range(len(self._stages)) for entry in self._state_entries(stage))
        for number, entry in enumerate(entries):
            if entry.name in mine and entry.island == self._domain.island:
                parameter = mine[entry.name][0]
                yield number, parameter, self._state_value(parameter, entry.kind)

    @torch.no_grad()
    def gather_stage(self, stage: int) -> dict[str, Tensor]:
        """Bring one stage's whole tensors to rank 0; other ranks get none."""
        domain = self._domain
        owner = stage % domain.config.pp
        tensors: dict[str, Tensor] = {}
        mine = group_by_name([entry for entry in self._held if not entry.is_second])
        for entry in self._state_entries(stage):
            sender = domain.leader_of(owner, entry.island)
            if (domain.pp, domain.island) == (owner, entry.island):
                parameter = mine[entry.name][0]
                full = join_parameter(parameter, self._state_value(parameter, entry.kind), domain)
                if dist.get_rank() == 0:
                    # not a view of what the next step changes
                    tensors[entry.state_key] = full.clone()
                elif domain.is_leader:
                    dist.send(full.contiguous(), dst=0)
            elif dist.get_rank() == 0:
                tensors[entry.state_key] = entry.empty_tensor()
                dist.recv(tensors[entry.state_key], src=sender)
        return tensors

    @torch.no_grad()
    def spread_stage(self, num_steps: int, stage: int, tensors: Mapping[str, Tensor] | None) -> None:
        """Take one stage's state from rank 0.

        Args:
            num_steps: Steps that the optimizer has made.
            tensors: Tensors by name; on rank 0 alone.
        """
        mine = group_by_name(self._held)
        for entry in self._state_entries(stage):
            full = entry.empty_tensor() if tensors is None else tensors[entry.state_key].contiguous()
            dist.broadcast(full, src=0)
            if not (_is_everywhere(entry.kind) or entry.island == self._domain.island):
                continue
            for parameter in mine.get(entry.name, ()):
                place = self._state_place(parameter, entry.kind, num_steps)
                if place is not None:
                    fill_parameter(parameter, place, full, self._domain)
        if self._outer is not None:
            self._outer.reset_anchors()

    def _state_entries(self, stage: int) -> Iterator[_StateEntry]:
        config = self._domain.config.outer
        islands = range(self._domain.config.num_islands)
        for kind in (WEIGHT, *moment_names(self._kind)):
            for island in (0,) if _is_everywhere(kind) else islands:
                for name, shape in self._stages[stage]:
                    shapes = {WEIGHT: shape, **moment_shapes(self._kind, shape)}
                    if kind in shapes:
                        yield _StateEntry(kind, name, shapes[kind], island)
        if config is None:
            return
        for name, shape in self._stages[stage]:
            yield _StateEntry(MOMENTUM, name, shape)
            for island in islands if config.compression != "none" else ():
                yield _StateEntry(RESIDUAL, name, shape, island)

    def _state_value(self, one: RankParameter, kind: str) -> Tensor:
        if kind == WEIGHT:
            return one.parameter
        if self._outer is not None and kind in (MOMENTUM, RESIDUAL):
            return self._outer.outer_state(one, kind)
        return self._update.gather_moment(one, kind)

    def _state_place(self, one: RankParameter, kind: str, num_steps: int) -> Tensor | None:
        if kind in (WEIGHT, MOMENTUM, RESIDUAL):
            return self._state_value(one, kind)
        return self._update.moment_target(one, kind, num_steps)


def _is_everywhere(kind: str) -> bool:
    """Whether all islands have the same of it after an outer step."""
    return kind in (WEIGHT, MOMENTUM)
