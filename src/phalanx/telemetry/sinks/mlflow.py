"""MLflow: a tracking server, or a folder."""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from phalanx.telemetry.sinks.sink import RunStatus, SinkSettings, TrackedRun

_RUN_TAG = "phalanx.run"
_STATES: dict[RunStatus, str] = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_PARAMETERS_AT_ONCE = 100
_LONGEST_VALUE = 6000


class MlflowConfig(SinkSettings):
    """MLflow; a password is in the environment (``MLFLOW_TRACKING_PASSWORD``). Needs the extra `mlflow`.

    Attributes:
        uri: Address of the tracking server; None for a folder in the run directory.
        experiment: Made where it is not there.
    """

    kind: Literal["mlflow"] = "mlflow"
    uri: str | None = Field(default=None, min_length=1)
    experiment: str = Field(default="phalanx", min_length=1)

    @model_validator(mode="after")
    def _check_secrets(self) -> Self:
        if self.uri is not None and urlsplit(self.uri).password is not None:
            raise ValueError(
                "uri has a password, and a run file is public; remove it and set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD"
            )
        return self


class MlflowSink:
    """One run of MLflow; a resumed one is found by its tag."""

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config
        self._client: Any = None
        self._run = ""

    def begin(self, run: TrackedRun) -> None:
        """As `Sink` says."""
        # its own usage reports, which no run file asks for; a folder is what works without a server or a database
        os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", MLFLOW_ALLOW_FILE_STORE="true")
        from mlflow.entities import Param  # noqa: PLC0415 - an extra, in this process alone
        from mlflow.tracking import MlflowClient  # noqa: PLC0415

        self._client = MlflowClient(tracking_uri=self._config.uri or Path(run.directory, "mlruns").resolve().as_uri())
        existing = self._client.get_experiment_by_name(self._config.experiment)
        experiment = (
            self._client.create_experiment(self._config.experiment) if existing is None else existing.experiment_id
        )
        runs = self._client.search_runs([experiment], f"tags.`{_RUN_TAG}` = '{run.id}'", max_results=1)
        if runs:
            self._run = runs[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        created = self._client.create_run(experiment, run_name=run.name, tags={_RUN_TAG: run.id})
        self._run = created.info.run_id
        parameters = [Param(name, str(value)[:_LONGEST_VALUE]) for name, value in run.config.items()]
        for first in range(0, len(parameters), _PARAMETERS_AT_ONCE):
            self._client.log_batch(self._run, params=parameters[first : first + _PARAMETERS_AT_ONCE], synchronous=True)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """As `Sink` says."""
        self._client.log_batch(self._run, metrics=list(_metric_entities(values, step)), synchronous=True)

    def end(self, status: RunStatus) -> None:
        """As `Sink` says."""
        self._client.set_terminated(self._run, _STATES[status])


def _metric_entities(values: Mapping[str, float], step: int) -> Iterator[Any]:
    from mlflow.entities import Metric  # noqa: PLC0415 - an extra, in this process alone

    now = int(time.time() * 1000)
    for name, value in values.items():
        yield Metric(name, value, now, step)
