"""What ``phalanx plan`` is asked, out of a run file or a model's config, and how its answer is printed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from phalanx.cli.console import say_figures, say_rows
from phalanx.planner.adapter import Adapter, adapted
from phalanx.planner.answer import Answer
from phalanx.planner.catalog import known_models, open_cluster
from phalanx.planner.guarding import Verification
from phalanx.planner.hardware import Cluster
from phalanx.planner.links import read_probe
from phalanx.planner.question import Question
from phalanx.planner.recipe import Recipe
from phalanx.planner.shape import ModelShape, read_shape, shape_of

_SHOWN = 15


def planned_cluster(name: str | None, gpus: list[int] | None, probe: Path | None) -> Cluster:
    """Return the cluster that was asked for, this machine when none was, with the links that a probe measured."""
    if name is not None:
        cluster = open_cluster(name)
    else:
        from phalanx.planner.local import this_machine

        cluster = this_machine(max(gpus) if gpus else None)
    if probe is None:
        return cluster
    link = read_probe(probe)
    return cluster.model_copy(update={"inside": link, "between": link})


def from_run(
    run_file: Path, overrides: list[str], cluster: Cluster, *, adapts: bool = True
) -> tuple[Question, dict[str, Any]]:
    """Return the question about a run file on all devices of a cluster, and the keys that it sets.

    Args:
        run_file: The file.
        overrides: Of its keys.
        cluster: Where.
        adapts: The file's adapter counts; else somebody else says what is trained.

    Raises:
        ConfigError: The file is wrong, or its adapter is none that ranks of a domain train.
    """
    from phalanx.train import load_run

    run = load_run(run_file, overrides)
    parallel, shape = run.parallel, _shape(run.model)
    recipe = Recipe(
        sequences=run.train.batch_size,
        sequence_length=run.data.sequence_length,
        microbatches=run.train.microbatches,
        precision="fp32" if run.train.precision == "fp32" else "autocast",
        checkpointing="full" if run.model.activation_checkpointing else "none",
        fused_attention=run.model.attention == "sdpa",
        fused_activation=parallel is not None,
        adapter=_adapter(run.model, shape) if adapts else None,
        outer=None if parallel is None or parallel.outer is None else parallel.outer.planned,
    )
    number = float(run.train.steps * recipe.tokens)
    own = None if parallel is None else parallel.layout
    question = Question(run.name, shape, recipe, cluster, (cluster.num_devices,), number, own=own)
    if parallel is None and run.guard.mode != "off" and run.pipeline.stages > 2:
        guard = run.guard
        verified = Verification(guard.audit_rate, guard.step_audit_rate, guard.owner_audit_rate)
        question = replace(question, guard=verified)
    return question, run.model_dump(mode="json", exclude_unset=True, exclude_none=True)


def say_plan(answer: Answer, html: Path | None, out: Path | None) -> None:
    """Print the best layouts, how many were refused, and what was written."""
    say_rows([_row(found.row()) for found in answer.ranking.valid[:_SHOWN]])
    best = answer.require_best()
    say_figures(
        {
            "best": best.layout,
            **({"layers": best.layers, "devices": best.devices} if best.layers is not None else {}),
            "usable": len(answer.ranking.valid),
            "refused": len(answer.ranking.refused),
            **{f"  {found.layout}": found.reason for found in answer.ranking.refused[:3]},
            **({"page": html} if html is not None else {}),
            **({"run file": out} if out is not None else {}),
        }
    )
    typer.echo("Estimates; --json and --html name what they rest on.")


def _row(row: dict[str, Any]) -> dict[str, Any]:
    words = {"layout": row["layout"], "m": row["microbatches"], "again": row["checkpointing"]}
    figures = {"memory_gib": "GiB", "step_s": "step s", "tokens_per_s": "tokens/s", "mfu": "MFU", "days": "days"}
    figures |= {"cost_usd_low": "USD from"}
    return words | {title: None if row[key] is None else f"{row[key]:.3g}" for key, title in figures.items()}


def _adapter(model: Any, shape: ModelShape) -> Adapter | None:
    if model.lora is None:
        return None
    adapter: Adapter = model.lora.planned
    # a target that is none is said before anything is planned
    adapted(shape, adapter)
    return adapter


def _shape(model: Any) -> ModelShape:
    if model.architecture is not None:
        whole = shape_of(model.architecture, "model.architecture")
    else:
        whole = known_models()[model.name] if model.name is not None else read_shape(Path(model.path or ""))
    return whole if model.layers is None else replace(whole, layers=min(model.layers, whole.layers))
