"""``phalanx plan --measured``: the stages of a run that goes on, from the speeds that its parties had."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures, print_rows
from phalanx.errors import ConfigError
from phalanx.planner.cost.partition import MeasuredParties, propose_layers
from phalanx.planner.model.compute import forward_flops
from phalanx.report.read import RunRecord, read_run
from phalanx.telemetry import PEERS_FILE
from phalanx.telemetry.parties import PartyRow, read_peers

if TYPE_CHECKING:
    from phalanx.train import PipelineRun

_SHOWN_STEPS = 20
"""The last steps with a measurement; of several the median counts."""
_PRESENT = frozenset({"connected", "serving", "shadowing"})
_MIN_LAYER_S = 1e-6
"""No machine is faster: a party says itself how long it took, and may say that it took no time."""


@dataclass(frozen=True)
class ProposedStages:
    """Stages for the workers that a run has now, by the speeds that they had.

    Attributes:
        layers: Number of layers of each stage: the owner's first and last, and one stage for each worker between them.
        layers_by_worker: Layers that each worker has now; the workers are in the order of the new stages.
        slowest_now_s: Seconds of a step of the slowest party with the present stages.
        slowest_then_s: Seconds of a step of the slowest party with the proposed stages.
    """

    layers: tuple[int, ...]
    layers_by_worker: Mapping[str, int]
    parties: MeasuredParties
    slowest_now_s: float
    slowest_then_s: float


def find_present(run_dir: Path) -> list[PartyRow]:
    """Return the workers that take part at the moment, or did when their owner ended."""
    status = read_peers(run_dir / PEERS_FILE)
    return [row for row in (status.parties if status else ()) if row.state in _PRESENT]


def measure_stages(run: "PipelineRun", run_dir: Path) -> ProposedStages | None:
    """Propose how to cut the layers of a run for the workers that it has now.

    Returns:
        None where there are fewer layers than stages.

    Raises:
        ConfigError: No step was measured.
    """
    from phalanx.train.setup.planned_memory import planned_shape

    shape = planned_shape(run.model)
    flops = forward_flops(shape, run.data.sequence_length)
    record, rows = read_run(run_dir), find_present(run_dir)
    stage_layers = _read_layers(record)
    edge_work = flops.head / (flops.block + flops.scores)
    owner_s, seconds_by_party = _measure_layers(
        record.metrics, rows, stage_layers, edge_work, shadows=run.guard.shadow_upkeep.in_lockstep
    )
    if owner_s is None or not seconds_by_party:
        raise ConfigError(
            f"{run_dir}: no step has the speeds of its parties; let it train some steps with workers"
        ).with_facts(code="PHX-C002", key="--measured", found="no measurement", expected="a run that has trained")
    # a party that has served nothing yet is taken for as fast as the mean of the others
    worker_s = {row.name: seconds_by_party.get(row.name, mean(seconds_by_party.values())) for row in rows}
    parties = MeasuredParties(owner_s, worker_s, edge_work)
    layers = propose_layers(shape.layers, parties)
    if layers is None:
        return None
    layers_by_worker = {row.name: _count_layers(stage_layers, row.serves) for row in rows}
    owned = shape.layers - sum(layers_by_worker.values())
    now_s = parties.slowest_seconds(owned, list(layers_by_worker.values()))
    then_s = parties.slowest_seconds(layers[0] + layers[-1], layers[1:-1])
    return ProposedStages(layers, layers_by_worker, parties, now_s, then_s)


def propose_stages(run_dir: Path) -> Answer:
    """Propose how to cut the layers anew; print the parties' speeds and the command that goes on with that cut.

    Raises:
        ConfigError: It is no run with a pipeline, no step of it was measured, or it has fewer layers than stages.
    """
    from phalanx.train import PipelineRun, load_run

    run = load_run(run_dir / "config.toml")
    if not isinstance(run, PipelineRun):
        raise ConfigError(f"{run_dir}: is no run with a pipeline, whose layers could be cut anew").with_facts(
            code="PHX-C002", key="--measured", found=run.engine, expected="a run with [pipeline]"
        )
    proposal = measure_stages(run, run_dir)
    if proposal is None:
        raise ConfigError(f"{run_dir}: its layers are too few for {len(find_present(run_dir))} workers and the owner")
    layers, worker_s = list(proposal.layers), proposal.parties.worker_s
    command = f"phalanx train RUN.toml --resume --set pipeline.stages={len(layers)} --set 'pipeline.layers={layers}'"
    print_rows(
        [
            {
                "party": name,
                "layers now": proposal.layers_by_worker[name],
                "proposed": count,
                "seconds a layer": f"{worker_s[name]:.3g}",
            }
            for name, count in zip(worker_s, layers[1:-1], strict=True)
        ]
    )
    facts: dict[str, Any] = {
        "stages": len(layers),
        "layers": layers,
        "slowest_now_s": proposal.slowest_now_s,
        "slowest_then_s": proposal.slowest_then_s,
        "owner_s": proposal.parties.owner_s,
        "worker_s": worker_s,
        "command": command,
    }
    print_figures({name: value for name, value in facts.items() if name != "worker_s"})
    typer.echo("An estimate from what the parties said of their work; one that lies gets more or less to do.", err=True)
    return Answer(facts)


def _read_layers(record: RunRecord) -> list[int]:
    """Return the layers of each stage in the newest session; none where its opening does not say them."""
    openings = record.events_of("run_started", "run_resumed")
    stages = openings[-1]["body"].get("stages", []) if openings else []
    pairs = [re.fullmatch(r"(\d+)-(\d+)", str(stage.get("layers"))) for stage in stages if isinstance(stage, dict)]
    return [int(pair[2]) - int(pair[1]) + 1 for pair in pairs if pair is not None]


def _count_layers(layers: Sequence[int], stages: Iterable[int]) -> int:
    # the rows of parties are of the newest session as well, but are written a moment later
    return sum(layers[stage] for stage in stages if stage < len(layers))


def _measure_layers(
    lines: list[dict[str, Any]], rows: list[PartyRow], layers: list[int], edge_work: float, *, shadows: bool
) -> tuple[float | None, dict[str, float]]:
    """Return the seconds of a step that owner and workers needed for one layer.

    Args:
        edge_work: Work of embedding and head, which the owner does beside its layers, in layers.
        shadows: Whether a shadow computes as much as who serves the stage.
    """
    own_seconds = [line["phases"]["compute"] for line in lines if "compute" in line.get("phases", {})][-_SHOWN_STEPS:]
    own_work = sum(layers[:1]) + sum(layers[1:][-1:]) + edge_work
    seconds_by_party = {}
    for row in rows:
        stages = (*row.serves, *(row.shadows if shadows else ()))
        seconds = [
            phases["seconds"]["compute"]
            for line in lines
            if (phases := line.get("party_phases", {}).get(row.name)) and "compute" in phases.get("seconds", {})
        ][-_SHOWN_STEPS:]
        num_layers = _count_layers(layers, stages)
        if seconds and num_layers:
            seconds_by_party[row.name] = max(_MIN_LAYER_S, median(seconds) / num_layers)
    owner_s = max(_MIN_LAYER_S, median(own_seconds) / own_work) if own_seconds and layers else None
    return owner_s, seconds_by_party
