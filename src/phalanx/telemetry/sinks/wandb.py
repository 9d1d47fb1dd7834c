"""Weights & Biases, online or as files that ``wandb sync`` sends later."""

import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from phalanx.telemetry.histogram import Histogram
from phalanx.telemetry.sinks.sink import RunStatus, SinkSettings, TrackedRun

_STEP = "step"


class WandbConfig(SinkSettings):
    """Weights & Biases; the key is in the environment (``WANDB_API_KEY``). Needs the extra `wandb`."""

    kind: Literal["wandb"] = "wandb"
    project: str = Field(default="phalanx", min_length=1)
    entity: str | None = Field(default=None, min_length=1)
    mode: Literal["online", "offline"] = "online"


class WandbSink:
    """One run of Weights & Biases: curves and the run file, nothing of the machine, its console or its code."""

    def __init__(self, config: WandbConfig) -> None:
        self._config = config
        self._run: Any = None

    def begin(self, run: TrackedRun) -> None:
        """As `Sink` says."""
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        import wandb  # noqa: PLC0415 - an extra, in this process alone

        settings = wandb.Settings(
            silent=True,
            host="phalanx",
            console="off",
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        self._run = wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            mode=self._config.mode,
            id=run.id,
            name=run.name,
            resume="allow",
            dir=run.directory,
            config=dict(run.config),
            settings=settings,
        )
        # its own counter only grows: a validation after step 20 would shut out what is known of step 19 a moment later
        self._run.define_metric("*", step_metric=_STEP)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """As `Sink` says."""
        self._run.log({**values, _STEP: step})

    def histogram(self, drawn: Histogram, step: int) -> None:
        """As `HistogramSink` says."""
        import numpy as np  # noqa: PLC0415 - in this process alone
        import wandb  # noqa: PLC0415 - an extra, in this process alone

        histogram = (np.asarray(drawn.counts), np.asarray(drawn.edges))
        self._run.log({drawn.tag: wandb.Histogram(np_histogram=histogram), _STEP: step})

    def end(self, status: RunStatus) -> None:
        """As `Sink` says."""
        self._run.finish(exit_code=0 if status == "completed" else 1)
