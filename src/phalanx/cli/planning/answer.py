"""The cluster that ``phalanx plan`` is asked about, and how its answer is printed."""

from pathlib import Path
from typing import Any

import typer

from phalanx.cli.console import print_figures, print_rows
from phalanx.cli.planning.guard import PlannedGuard, print_guard
from phalanx.planner.cluster.catalog import open_cluster
from phalanx.planner.cluster.hardware import Cluster
from phalanx.planner.cluster.links import read_probe
from phalanx.planner.cost.estimate import Estimate
from phalanx.planner.search.answer import PlanAnswer, refusal_causes
from phalanx.planner.search.rank import ERROR

_SHOWN = 15


def planned_cluster(name: str | None, gpus: list[int] | None, probe: Path | None) -> Cluster:
    """Return the cluster that was asked for, this machine when none was, with the links that a probe measured."""
    if name is not None:
        cluster = open_cluster(name)
    else:
        from phalanx.planner.cluster.local import this_machine

        cluster = this_machine(max(gpus) if gpus else None)
    if probe is None:
        return cluster
    link = read_probe(probe)
    return cluster.model_copy(update={"inside": link, "between": link})


def print_plan(answer: PlanAnswer, html: Path | None, out: Path | None, guarded: PlannedGuard | None) -> None:
    """Print the best layouts, the number of refused ones, written files, and the guard's findings and cost."""
    print_rows([_layout_row(layout.estimate_row()) for layout in answer.ranking.valid[:_SHOWN]])
    best = answer.require_best()
    print_figures(
        {
            "best": best.layout,
            "global batch": _describe_batch(best),
            **({"layers": best.layers, "devices": best.devices} if best.layers is not None else {}),
            "usable": len(answer.ranking.valid),
            "refused": len(answer.ranking.refused),
            **({"page": html} if html is not None else {}),
            **({"run file": out} if out is not None else {}),
        }
    )
    typer.echo("\n".join(refusal_causes(answer.ranking.refused)))
    typer.echo(
        f"Estimates; --json and --html list the assumptions. Within {100 * ERROR:.0f} % none is the faster: of such "
        "layouts the common one stands first."
    )
    print_guard(guarded)


def _describe_batch(best: Estimate) -> str:
    """Describe the batch of one step over all ranks, which no layout changes."""
    recipe, copies = best.recipe, best.layout.dp
    share = f"{recipe.microbatches} x {recipe.sequences // copies // recipe.microbatches} on each of {copies}"
    tokens = recipe.sequences * recipe.sequence_length
    return f"{recipe.sequences} sequences of {recipe.sequence_length:,} tokens = {tokens:,} tokens ({share})"


def _layout_row(row: dict[str, Any]) -> dict[str, Any]:
    cells = {"layout": row["layout"], "m": row["microbatches"], "again": row["checkpointing"]}
    figures = {"memory_gib": "GiB", "step_s": "step s", "tokens_per_s": "tokens/s", "mfu": "MFU", "days": "days"}
    figures |= {"cost_usd_low": "USD from"}
    if row["project_usd_low"] is not None:
        figures |= {"project_usd_low": "project USD from"}
    if row["days"] is not None and row["days"] < 1:
        row, figures = {**row, "hours": 24 * row["days"]}, {**figures, "hours": "hours"}
        del figures["days"]
    return cells | {title: None if row[key] is None else f"{row[key]:.3g}" for key, title in figures.items()}
