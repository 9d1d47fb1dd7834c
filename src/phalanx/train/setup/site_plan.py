"""The run and the plan that the pipeline of a site is, as they follow from the run file of the rounds."""

from phalanx.checkpoint import CheckpointConfig
from phalanx.models import ModelSource
from phalanx.pipeline import StepPlan
from phalanx.train.config import RunConfig
from phalanx.train.federated_faults import section_of
from phalanx.train.setup.layout import make_plan


def pipeline_of(run: RunConfig) -> RunConfig:
    """Return the run that a site's pipeline is: the same stages and guard, local steps in the place of rounds."""
    steps = run.train.steps * section_of(run).local_steps
    # nothing is saved: a round begins with weights that the site is sent
    return run.with_sections({"federated": None, "checkpoint": CheckpointConfig(journal=False)}).of_length(steps)


def plan_of(run: RunConfig, source: ModelSource) -> StepPlan:
    """Return the plan of a site's pipeline, as its workers have it.

    Args:
        run: Needs ``[federated]`` and ``[pipeline]``.

    Raises:
        ConfigError: Run file and model do not fit.
    """
    return make_plan(pipeline_of(run), source).model_copy(update={"steps_a_round": section_of(run).local_steps})
