"""The part of ``phalanx plan`` about leaks: how much of the text each middle stage of a pipeline learns."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from phalanx.cli.console import print_rows
from phalanx.errors import ConfigError
from phalanx.planner.cuts import StageLeak, StageLeakTable, read_stage_leaks
from phalanx.planner.cuts.stages import Regime
from phalanx.planner.model.shape import ModelShape


@dataclass(frozen=True)
class PlannedLeaks:
    """The expected leak of each middle stage, and the table that it is from."""

    stages: tuple[StageLeak, ...]
    table: StageLeakTable

    def as_json(self) -> dict[str, Any]:
        """Every stage, with the command and the commit of the measurement."""
        return {
            "stage_leaks": {
                "command": self.table.command,
                "commit": self.table.commit,
                "stages": [asdict(stage) for stage in self.stages],
            }
        }


def stage_leaks_of(run_file: Path, overrides: list[str], shape: ModelShape, leaks: Path | None) -> PlannedLeaks | None:
    """Look up the leaks of a pipeline; None where no other party has a stage, or none like it was measured."""
    planned = _find_leaks(run_file, overrides, shape, leaks)
    if planned is None and leaks is not None:
        raise ConfigError(
            f"plan: --leaks {leaks} has no stage of {run_file}: expected --split, or a pipeline with stages of others "
            "of which a model like this one was measured"
        ).with_facts(code="PHX-C002", key="--leaks", do="remove it")
    return planned


def _find_leaks(run_file: Path, overrides: list[str], shape: ModelShape, leaks: Path | None) -> PlannedLeaks | None:
    from phalanx.models import partition_layers
    from phalanx.train import PipelineRun, load_run

    run = load_run(run_file, overrides)
    if not isinstance(run, PipelineRun) or run.pipeline.stages < 3:
        return None
    head = shape.head_matrix / shape.layer_matrix
    cut = partition_layers(shape.layers, run.pipeline.stages, run.pipeline.layers, 0.0, head, ends_in_one_process=True)
    regime: Regime = "scratch" if run.model.from_scratch else "full" if run.model.adapter is None else "lora"
    table = read_stage_leaks(leaks)
    stages = table.leaks_of(shape, regime, [(spec.first_layer, spec.end_layer) for spec in cut])
    return None if stages is None else PlannedLeaks(stages, table)


def print_stage_leaks(planned: PlannedLeaks | None) -> None:
    """Print a line for each middle stage."""
    if planned is not None:
        print_rows([_leak_row(stage) for stage in planned.stages])
        typer.echo(
            "What a stage's holder recovers from its messages, in per cent (chance in brackets): tokens and kind of "
            "text from activations, next tokens from gradients; measured where the last column says. Commitments and "
            "audits hide nothing."
        )


def _leak_row(stage: StageLeak) -> dict[str, str]:
    def share(value: float, chance: float) -> str:
        return f"{100 * value:.0f} ({100 * chance:.0f})"

    return {
        "stage": str(stage.stage),
        "blocks": f"{stage.first_layer} to {stage.end_layer - 1}",
        "tokens %": share(stage.tokens, stage.tokens_chance),
        "next tokens %": share(stage.labels, stage.labels_chance),
        **{f"{key} %": share(value, stage.properties_chance[key]) for key, value in stage.properties.items()},
        "measured on": stage.basis,
    }
