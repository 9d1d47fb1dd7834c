"""Metrics sinks beside the run's own files; to add one: one file with its config, one line of the table."""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.config import any_kind, resolve_kind
from phalanx.errors import ConfigError
from phalanx.telemetry.sinks.mlflow import MlflowConfig as MlflowConfig, MlflowSink
from phalanx.telemetry.sinks.sink import (
    OwnSinkConfig as OwnSinkConfig,
    RunStatus as RunStatus,
    Sink as Sink,
    SinkSettings as SinkSettings,
    TrackedRun as TrackedRun,
    check_own_sink,
    own_sink,
)
from phalanx.telemetry.sinks.trackio import TrackioConfig as TrackioConfig, TrackioSink
from phalanx.telemetry.sinks.wandb import WandbConfig as WandbConfig, WandbSink


@dataclass(frozen=True)
class SinkEntry:
    """One line of the table."""

    config: type[SinkSettings]
    open: Callable[[Any], Sink]
    check: Callable[[], None]


def _require_package(package: str) -> Callable[[], None]:
    def check() -> None:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"needs {package}; install phalanx-train[{package}], or take the section out")

    return check


SINKS: dict[str, SinkEntry] = {
    "wandb": SinkEntry(WandbConfig, WandbSink, _require_package("wandb")),
    "mlflow": SinkEntry(MlflowConfig, MlflowSink, _require_package("mlflow")),
    "trackio": SinkEntry(TrackioConfig, TrackioSink, _require_package("trackio")),
}


if TYPE_CHECKING:
    SinkConfig = SinkSettings
else:
    # at run time the table alone says which there are
    SinkConfig = any_kind({name: entry.config for name, entry in SINKS.items()}, OwnSinkConfig)


def open_sink(config: SinkConfig) -> Sink:
    """Make a sink; it has not begun."""
    return resolve_kind(config.kind, SINKS, _own_line).open(config)


def check_sinks(configs: Sequence[SinkConfig]) -> None:
    """Refuse sinks that cannot be had on this machine; nothing is opened or sent."""
    for number, config in enumerate(configs):
        try:
            resolve_kind(config.kind, SINKS, _own_line).check()
        except ConfigError as exc:
            raise ConfigError(f"tracking.{number}: {config.kind.partition('@')[0]}: {exc}") from exc


def _own_line(kind: str, implementation: Any) -> SinkEntry:
    return SinkEntry(
        OwnSinkConfig,
        lambda config: own_sink(kind, implementation, config),
        functools.partial(check_own_sink, kind, implementation),
    )
