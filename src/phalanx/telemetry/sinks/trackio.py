"""trackio: a database on this machine, or a Space of the hub."""

import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from phalanx.telemetry.histogram import Histogram
from phalanx.telemetry.sinks.sink import RunStatus, SinkSettings, TrackedRun

_ELSEWHERE = (
    "TRACKIO_SPACE_ID",
    "TRACKIO_SERVER_URL",
    "TRACKIO_BUCKET_ID",
    "TRACKIO_DATASET_ID",
    "TRACKIO_WEBHOOK_URL",
)
"""Variables that would send a run to where its run file does not say."""


class TrackioConfig(SinkSettings):
    """trackio; a token for a Space is in the environment (``HF_TOKEN``). Needs the extra `trackio`.

    Attributes:
        project: The database's name; ``trackio show --project NAME`` opens it.
        space: Space of the hub, as ``user/name``, which is then private; None: nothing leaves this machine.
    """

    kind: Literal["trackio"] = "trackio"
    project: str = Field(default="phalanx", pattern=r"^[A-Za-z0-9_-]+$")
    space: str | None = Field(default=None, min_length=1)


class TrackioSink:
    """One run of trackio."""

    def __init__(self, config: TrackioConfig) -> None:
        self._config = config
        self._run: Any = None

    def begin(self, run: TrackedRun) -> None:
        """As `Sink` says."""
        for name in _ELSEWHERE:
            os.environ.pop(name, None)
        import trackio  # noqa: PLC0415 - an extra, in this process alone

        self._run = trackio.init(
            project=self._config.project,
            # runs are told apart by name alone
            name=f"{run.name}-{run.id[:8]}",
            space_id=self._config.space,
            private=None if self._config.space is None else True,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """As `Sink` says."""
        self._run.log(dict(values), step=step)

    def histogram(self, drawn: Histogram, step: int) -> None:
        """As `HistogramSink` says."""
        import numpy as np  # noqa: PLC0415 - in this process alone
        import trackio  # noqa: PLC0415 - an extra, in this process alone

        histogram = (np.asarray(drawn.counts), np.asarray(drawn.edges))
        self._run.log({drawn.tag: trackio.Histogram(np_histogram=histogram)}, step=step)

    def end(self, status: RunStatus) -> None:
        """As `Sink` says."""
        del status
        self._run.finish()
