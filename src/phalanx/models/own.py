"""A model family of the user's own: ``model.family = "file.py:object"``."""

from typing import Any

from phalanx.config import lacks, users_traceback
from phalanx.errors import ConfigError
from phalanx.models.family import Family
from phalanx.planner.model.families import FamilyFacts
from phalanx.planner.model.families.planned import PlannedFamily

_EXPECTED = (
    "a PlannedFamily that is called as its model_type, or a class that inherits from phalanx.models.Family with "
    "model_type and facts"
)


def own_family(kind: str, found: Any) -> tuple[Family | str, FamilyFacts]:
    """Make a family of what a reference names.

    Returns:
        The family, or the model_type of one that is cut by transformers' plan; and what is known of it without torch.

    Raises:
        ConfigError: It is no family.
    """
    if isinstance(found, PlannedFamily):
        return kind.rpartition(":")[2], found.facts
    if not (isinstance(found, type) and issubclass(found, Family)):
        raise lacks(kind, f"a {type(found).__name__}", _EXPECTED)
    missing = [name for name in ("model_type", "prefix", "trunk", "facts") if getattr(found, name, None) is None]
    if found.facts is Family.facts:
        missing.append("facts")
    if missing:
        raise lacks(kind, f"a family without {' and '.join(missing)}", _EXPECTED)
    try:
        made = found()
        facts = made.facts
    except Exception as exc:
        # whatever the user's code raises
        raise ConfigError(f"{kind}: cannot be made:\n{users_traceback(exc)}") from exc
    return made, facts
