"""A metrics sink of the user's own: ``kind = "file.py:object"``."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from phalanx.config import check_methods, lacks
from phalanx.config.strict import check_reference
from phalanx.telemetry.sinks.sink import Sink, SinkSettings

_EXPECTED = "a metrics sink, with begin(run), scalars(values, step) and end(status)"


class OwnSinkConfig(SinkSettings):
    """A metrics sink of the user's own; what `kind` names is called with the options as keywords."""

    kind: Annotated[str, AfterValidator(check_reference)]
    options: dict[str, Any] = Field(default={})


def own_sink(kind: str, found: Any, config: OwnSinkConfig) -> Sink:
    """Make a sink of what a reference names.

    Raises:
        ConfigError: It is no sink.
    """
    check_own_sink(kind, found)
    made = found(**config.options)
    check_methods(kind, made, _EXPECTED, ("begin", "scalars", "end"))
    sink: Sink = made
    return sink


def check_own_sink(kind: str, found: Any) -> None:
    """Return where an object may make a sink; a class is looked at without being called.

    Raises:
        ConfigError: It does not.
    """
    if not callable(found):
        raise lacks(kind, f"a {type(found).__name__}", "a class or function that makes a metrics sink")
    if isinstance(found, type):
        check_methods(kind, found, _EXPECTED, ("begin", "scalars", "end"))
