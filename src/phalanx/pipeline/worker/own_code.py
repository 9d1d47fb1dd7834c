"""Model families of the user's own at a worker: loaded from its own file, and compared with what an owner names."""

from pathlib import Path

from phalanx.config import code_key, open_own_code
from phalanx.errors import ConfigError
from phalanx.models.families import ADOPTED, adopt_family
from phalanx.pipeline.config import WorkerConfig
from phalanx.pipeline.plan import StepPlan


def load_code(config: WorkerConfig) -> None:
    """Load the families that a worker's own file names.

    Raises:
        ConfigError: One cannot be had, or is no family.
    """
    for own in config.code:
        open_own_code(own.kind, Path(config.code_home or ""))
        adopt_family(own.kind)


def check_code(plan: StepPlan, config: WorkerConfig) -> None:
    """Return where a worker runs a plan's model by the very code that the owner does.

    Args:
        plan: The owner's; what it names is a claim, and loads nothing.
        config: The worker's own file.

    Raises:
        ConfigError: The plan has a family of the owner's own that the file does not name, or another; or the file has
            one for this model and the plan none.
    """
    wanted = () if plan.family is None else (code_key(plan.family),)
    mine = {code_key(own.kind): own.kind for own in config.code}
    own_type = plan.hub_config.get("model_type") in ADOPTED
    if all(key in mine for key in wanted) and (wanted or not own_type):
        return
    named = ", ".join(mine.values()) or "none"
    raise ConfigError(
        f"code: the owner's model is cut by {plan.family or 'a family of the package'}, this worker's file names "
        f"{named}; if you trust that code, put the very file beside the worker file and name it in [[code]]"
    )
