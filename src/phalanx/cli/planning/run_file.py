"""The question that a run file puts to ``phalanx plan``."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.cli.console import print_figures, print_rows
from phalanx.planner.cluster.hardware import Cluster
from phalanx.planner.cost.parties import PartyPlan, plan_parties
from phalanx.planner.guard.finding import Verification
from phalanx.planner.layout import Layout
from phalanx.planner.search.question import Question


def question_from_run(
    run_file: Path, overrides: list[str], cluster: Cluster, *, adapts: bool = True
) -> tuple[Question, dict[str, Any]]:
    """Return the question about a run file on all devices of a cluster, and the keys that it sets.

    Args:
        adapts: Whether the file's adapter decides the trained weights; else the caller does.

    Raises:
        ConfigError: The file is wrong, or its adapter is none that ranks of a domain train.
    """
    from phalanx.train import GuardedRun, RankedRun, load_run
    from phalanx.train.setup.planned_memory import planned_recipe, planned_shape

    run = load_run(run_file, overrides)
    run.require_steps("phalanx plan")
    parallel, shape = run.parallel if isinstance(run, RankedRun) else None, planned_shape(run.model)
    recipe = planned_recipe(run, shape, adapts=adapts)
    number = float(run.train.steps * recipe.tokens_per_step)
    current_layout = None if parallel is None else parallel.planned_layout
    question = Question(run.name, shape, recipe, cluster, (cluster.num_devices,), number, own=current_layout)
    if isinstance(run, GuardedRun) and run.guard.mode != "off" and run.pipeline.stages > 2:
        guard = run.guard
        verified = Verification(guard.audit_rate, guard.step_audit_rate, guard.owner_audit_rate)
        question = replace(question, guard=verified)
    return question, run.model_dump(mode="json", exclude_unset=True, exclude_none=True)


def parties_from_run(run_file: Path, overrides: list[str], question: Question) -> PartyPlan | None:
    """Plan the parties of a run file that gives some of them several ranks; None for other run files.

    Each middle stage is held by the local worker of its number, as a run assigns them at first.
    """
    from phalanx.train import GuardedRun, load_run

    run = load_run(run_file, overrides)
    if not isinstance(run, GuardedRun) or (run.pipeline.layout is None and not run.pipeline.layouts):
        return None
    stages, schedule = run.pipeline.stages, run.pipeline.schedule
    middle = run.pipeline.worker_names[: max(0, stages - 2)]
    alone = Layout(pp=stages, schedule=schedule)
    shared = [(name, _party_layout(run.pipeline.layout_of(name), alone)) for name in middle]
    holders = [("owner", alone), *shared, ("owner", alone)]
    return plan_parties(question.shape, question.recipe, question.cluster, holders, schedule, question.guard)


def _party_layout(party: Any, alone: Layout) -> Layout:
    axes = {name: getattr(party, name) for name in ("dp", "tp", "cp", "zero", "context")}
    return replace(alone, **axes)


def print_parties(parties: PartyPlan) -> None:
    """Print each stage with its party, and the step of all of them."""
    print_rows(parties.party_rows())
    print_figures({"step of the parties, s": parties.step_s, "tokens/s of the parties": parties.tokens_per_s})
