"""A verified pipeline whose parties have ranks of their own: seconds of a step, and memory of each party's ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.errors import ConfigError
from phalanx.planner.cluster.catalog import device_of
from phalanx.planner.cluster.hardware import GIB, Cluster
from phalanx.planner.cluster.machine import Machine
from phalanx.planner.cost.estimate import effective_recipe, machine_of, usable_bytes
from phalanx.planner.cost.exchanging import data_exchange
from phalanx.planner.cost.guarded_step import GuardedPipeline, Line, StageDurations
from phalanx.planner.cost.memory import held_parameters, rank_memory, stage_layers
from phalanx.planner.cost.step import stage_times, update_seconds
from phalanx.planner.guard.finding import Verification
from phalanx.planner.layout import Layout
from phalanx.planner.model.activations import boundary_bytes
from phalanx.planner.model.recipe import Recipe
from phalanx.planner.model.shape import ModelShape
from phalanx.planner.validity import describe_refusal

_GRADIENT_BYTES = 4
MIN_STAGES = 3


@dataclass(frozen=True)
class PlannedParty:
    """The holder of one stage.

    Attributes:
        name: Name of the party; the owner has the first and the last stage.
        forward_s: Seconds of a microbatch's forward pass on its ranks, their exchanges included.
        backward_s: Seconds of a microbatch's backward pass, likewise.
        memory_bytes: Memory of the rank that needs most, with the stage that it shadows.
    """

    stage: int
    name: str
    layout: Layout
    forward_s: float
    backward_s: float
    memory_bytes: int


@dataclass(frozen=True)
class PartyPlan:
    """The predicted step of such a pipeline, each party on its own devices.

    Attributes:
        limit: Bytes that a rank may use.
    """

    parties: tuple[PlannedParty, ...]
    step_s: float
    tokens_per_s: float
    limit: float

    def party_rows(self) -> list[dict[str, Any]]:
        """Return a flat JSON object for each stage."""
        return [
            {
                "stage": party.stage,
                "party": party.name,
                "ranks": party.layout.num_ranks // party.layout.pp,
                **{name: getattr(party.layout, name) for name in ("dp", "tp", "cp", "zero")},
                "forward_s": party.forward_s,
                "backward_s": party.backward_s,
                "memory_gib": party.memory_bytes / GIB,
                "fits": party.memory_bytes <= self.limit,
            }
            for party in self.parties
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the step and its parties as one JSON object."""
        return {"step_s": self.step_s, "tokens_per_s": self.tokens_per_s, "rows": self.party_rows()}


def plan_parties(
    shape: ModelShape,
    recipe: Recipe,
    cluster: Cluster,
    layouts: Sequence[tuple[str, Layout]],
    schedule: str,
    guard: Verification | None,
) -> PartyPlan:
    """Simulate a step of a pipeline whose stages are each held by a party with its own layout.

    Args:
        recipe: Training recipe; its microbatches cross between parties whole, and `dp` of a party divides their rows.
        layouts: Party and layout of each stage, all with as many pipeline ranks as there are stages. The owner is one
            process with two stages.
        guard: Audits of the middle stages; None without a guard.

    Raises:
        ConfigError: Fewer than three stages, or a layout that cannot train the model.
    """
    if len(layouts) < MIN_STAGES:
        raise ConfigError(f"plan: parties with ranks hold middle stages, found {len(layouts)} stages; set at least 3")
    recipe = effective_recipe(recipe, cluster)
    machine = machine_of(cluster, device_of(cluster, cluster.pools[0].device), recipe.precision)
    for name, layout in layouts:
        # unlike ranks of one domain, parties also work with fewer microbatches than stages
        reason = describe_refusal(replace(layout, pp=1), shape, recipe)
        if reason is not None:
            raise ConfigError(f"plan: {name}: {reason}")
    durations = [_stage_durations(shape, recipe, machine, stage, layout) for stage, (_, layout) in enumerate(layouts)]
    whole = Layout(pp=len(layouts), schedule=schedule)
    pipeline = GuardedPipeline(
        durations,
        recipe.microbatches,
        boundary_bytes(shape, whole, recipe),
        Line(machine.between.bytes_per_s, machine.between.latency_s),
        schedule,
        is_guarded=guard is not None,
        audits=0 if guard is None else math.ceil(guard.audit_rate * recipe.microbatches),
    )
    step_s = pipeline.step_seconds()
    parties = tuple(
        PlannedParty(
            stage,
            name,
            layout,
            durations[stage].forward,
            durations[stage].backward,
            _party_memory(shape, recipe, pipeline, layouts, stage),
        )
        for stage, (name, layout) in enumerate(layouts)
    )
    return PartyPlan(parties, step_s, recipe.tokens_per_step / step_s, usable_bytes(cluster))


def _stage_durations(shape: ModelShape, recipe: Recipe, machine: Machine, stage: int, layout: Layout) -> StageDurations:
    times = stage_times(shape, layout, recipe, machine)[0][stage]
    # copies of a party join their gradients when all microbatches are done
    exchange, _ = data_exchange(shape, layout, recipe, machine, 0.0)
    layers = stage_layers(shape, recipe.sequence_length, layout.pp)[stage]
    trained = held_parameters(shape, Layout(pp=layout.pp), recipe, layers, stage).trained
    return StageDurations(
        forward=times.forward,
        backward=times.inputs + times.weights,
        audit=times.forward + times.inputs,
        update=exchange + update_seconds(shape, layout, recipe, machine),
        gradient_bytes=float(_GRADIENT_BYTES * trained),
    )


def _party_memory(
    shape: ModelShape,
    recipe: Recipe,
    pipeline: GuardedPipeline,
    layouts: Sequence[tuple[str, Layout]],
    stage: int,
) -> int:
    """Bytes of a stage on a rank of its party, with the state of the stage that the party shadows."""
    layout = layouts[stage][1]
    total = rank_memory(shape, layout, recipe, stage).total_bytes
    middle = range(1, len(layouts) - 1)
    shadowed = [other for other in middle if pipeline.is_guarded and stage in pipeline.shadows_of(other)]
    for other in shadowed:
        copy = rank_memory(shape, layout, recipe, other)
        total += copy.parameters + copy.optimizer
    return total
