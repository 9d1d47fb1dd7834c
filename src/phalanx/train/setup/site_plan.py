"""The plan of a site's pipeline, as it follows from the run file of the rounds."""

from phalanx.models import ModelSource
from phalanx.pipeline import StepPlan
from phalanx.train.config import FederatedPipelineRun
from phalanx.train.setup.layout import make_plan


def plan_of(run: FederatedPipelineRun, source: ModelSource) -> StepPlan:
    """Return the plan of a site's pipeline, as its workers have it.

    Raises:
        ConfigError: Run file and model do not fit.
    """
    return make_plan(run.site_pipeline, source).model_copy(update={"steps_a_round": run.federated.local_steps})
