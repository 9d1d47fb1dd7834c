"""The question that a run file puts to ``phalanx plan``."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError
from phalanx.planner.cluster.hardware import Cluster
from phalanx.planner.guard.finding import Verification
from phalanx.planner.search.question import Question


def question_from_run(
    run_file: Path, overrides: list[str], cluster: Cluster, *, adapts: bool = True
) -> tuple[Question, dict[str, Any]]:
    """Return the question about a run file on all devices of a cluster, and the keys that it sets.

    Args:
        adapts: Whether the file's adapter decides the trained weights; else the caller does.

    Raises:
        ConfigError: The file is wrong, its adapter is none that ranks of a domain train, or parties have layouts.
    """
    from phalanx.train import GuardedRun, RankedRun, load_run
    from phalanx.train.setup.planned_memory import planned_recipe, planned_shape

    run = load_run(run_file, overrides)
    run.require_steps("phalanx plan")
    if isinstance(run, GuardedRun):
        _require_plain_parties(run.pipeline, run_file)
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


def _require_plain_parties(pipeline: Any, run_file: Path) -> None:
    """Return where no party shares a stage among ranks.

    Raises:
        ConfigError: A party shares a stage among ranks, and the figures would describe one process.
    """
    for key in ("layout", "layouts"):
        value = getattr(pipeline, key)
        if value is not None:
            raise ConfigError(
                f"{run_file}: pipeline.{key}: phalanx plan cannot estimate a party of several ranks; plan with one "
                f"process for each party: --unset pipeline.{key}"
            ).with_facts(
                code="PHX-C002",
                file=str(run_file),
                key=f"pipeline.{key}",
                found=str(value),
                expected="parties of one process each",
                do=f"--unset pipeline.{key}",
            )
