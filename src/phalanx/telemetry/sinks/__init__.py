"""Metrics sinks beside the run's own files; to add one: one file with its config, one line of the table."""

import functools
import importlib.util
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Discriminator, Tag

from phalanx.config import OWN_KIND, is_own, resolve
from phalanx.errors import ConfigError
from phalanx.telemetry.sinks.mlflow import MlflowConfig, MlflowSink
from phalanx.telemetry.sinks.sink import (
    OwnSinkConfig,
    RunStatus,
    Sink,
    SinkSettings,
    TrackedRun,
    check_own_sink,
    own_sink,
)
from phalanx.telemetry.sinks.trackio import TrackioConfig, TrackioSink
from phalanx.telemetry.sinks.wandb import WandbConfig, WandbSink


@dataclass(frozen=True)
class SinkLine:
    """One line of the table.

    Attributes:
        config: What a run file says of it.
        open: Makes the sink, in its own process.
        check: Refuses what cannot be had, in the owner's.
    """

    config: type[SinkSettings]
    open: Callable[[Any], Sink]
    check: Callable[[], None]


def _needs(package: str) -> Callable[[], None]:
    def check() -> None:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"needs {package}; install phalanx-train[{package}], or take the section out")

    return check


SINKS: dict[str, SinkLine] = {
    "wandb": SinkLine(WandbConfig, WandbSink, _needs("wandb")),
    "mlflow": SinkLine(MlflowConfig, MlflowSink, _needs("mlflow")),
    "trackio": SinkLine(TrackioConfig, TrackioSink, _needs("trackio")),
}


def _tag(value: Any) -> Any:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return OWN_KIND if is_own(kind) else kind


if TYPE_CHECKING:
    SinkConfig = SinkSettings
else:
    # at run time the table alone says which there are
    _tagged = [Annotated[line.config, Tag(name)] for name, line in SINKS.items()]
    SinkConfig = Annotated[
        functools.reduce(operator.or_, [*_tagged, Annotated[OwnSinkConfig, Tag(OWN_KIND)]]), Discriminator(_tag)
    ]


def open_sink(config: SinkConfig) -> Sink:
    """Make a sink; it has not begun.

    Raises:
        ConfigError: It is the user's own and no sink, or was not loaded.
    """
    return resolve(config.kind, SINKS, _own_line).open(config)


def check_sinks(configs: Sequence[SinkConfig]) -> None:
    """Refuse sinks that cannot be had on this machine; nothing is opened or sent.

    Raises:
        ConfigError: Names the section, and the extra that is missing or what the user's own code lacks.
    """
    for number, config in enumerate(configs):
        try:
            resolve(config.kind, SINKS, _own_line).check()
        except ConfigError as exc:
            raise ConfigError(f"tracking.{number}: {config.kind.partition('@')[0]}: {exc}") from exc


def _own_line(kind: str, found: Any) -> SinkLine:
    return SinkLine(
        OwnSinkConfig, lambda config: own_sink(kind, found, config), functools.partial(check_own_sink, kind, found)
    )


__all__ = [
    "SINKS",
    "MlflowConfig",
    "OwnSinkConfig",
    "RunStatus",
    "Sink",
    "SinkConfig",
    "SinkLine",
    "SinkSettings",
    "TrackedRun",
    "TrackioConfig",
    "WandbConfig",
    "check_sinks",
    "open_sink",
]
