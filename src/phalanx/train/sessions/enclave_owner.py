"""The enclave of a split as the owner of a pipeline: it guards middle stages at workers, with a log of its own."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from phalanx.config import StrictModel, digest_config
from phalanx.engine import GuardReport
from phalanx.errors import CheckpointError, ConfigError, RollbackError
from phalanx.models import ModelSource
from phalanx.pipeline import OWNER, PipelineEngine, StageChecks, WorkerConfig
from phalanx.security.audit import AuditLog, LogHead
from phalanx.split.channel import messages as say
from phalanx.split.channel.message import SplitMessage
from phalanx.split.processes.local_enclave import EnclaveConfig
from phalanx.split.roles.server import MakeTrainer
from phalanx.split.roles.serving import serve_enclave
from phalanx.train.config import SplitPipelineRun
from phalanx.train.engines.pipeline_trainer import PipelineTrainer
from phalanx.train.records.audit_trail import LOG_FILE
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.records.unstarted import MIDDLE
from phalanx.train.sessions.owned_pipeline import OwnedPipeline
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.process import deterministic_kernels
from phalanx.train.setup.stage_source import BackLibrary
from phalanx.transport import Endpoint

CHECKED = "checked"
"""Name of the enclave's report of the checks of an applied step; not an event of the log."""

Tell = Callable[[SplitMessage], None]
"""Sends the owner of the run a message."""


class EnclaveOwnerConfig(StrictModel):
    """The file that an enclave with a pipeline is started with.

    Attributes:
        run: The run file; the config digest that clients appraise is its digest.
        middle: Directory of the log, the evidence and the keys of the middle stages.
    """

    enclave: EnclaveConfig
    run: SplitPipelineRun
    middle: str


def serve_owner(config: EnclaveOwnerConfig) -> None:
    """Be the enclave and the owner of its pipeline until the owner of the run ends the session.

    Raises:
        PhalanxError: As `phalanx.split.roles.server.serve`; or a worker did not come, or the log is broken.
    """
    run = config.run
    if digest_config(run) != config.enclave.config_digest:
        raise ConfigError("enclave file: its config digest belongs to another run; let the run start it")
    home = RunDirectory(Path(config.middle), run, resume=True, parties=run.stage_workers)

    @contextlib.contextmanager
    def open_trainer(endpoint: Endpoint, source: ModelSource) -> Iterator[MakeTrainer]:
        def tell(message: SplitMessage) -> None:
            endpoint.send_frame(OWNER, message.kind, message.model_dump(mode="json"))

        pipeline = EnclavePipeline(run, home, source, tell)
        with pipeline.owned:
            yield lambda whole: PipelineTrainer(whole, pipeline, source.vocab_size)

    with deterministic_kernels(run.train.threads):
        serve_enclave(config.enclave, open_trainer=open_trainer)


class EnclavePipeline:
    """The pipeline of an enclave: its settings, and its reports to the owner of the run."""

    def __init__(self, run: SplitPipelineRun, home: RunDirectory, source: ModelSource, tell: Tell) -> None:
        self._run, self._source, self._tell = run, source, tell
        self._plan = make_plan(run, source)
        self.owned = OwnedPipeline(
            run,
            home,
            self._plan,
            lambda directory: contextlib.nullcontext(AskedWorkers(tell)),
            lambda kind, body: tell(say.GuardEvent(event=kind, facts=body)),
            self._report_checks,
        )

    def assign_stages(self, state: Mapping[str, Tensor], num_steps: int) -> PipelineEngine:
        """Give every party its stages, cut from the state of the whole back part after so many steps."""
        library = BackLibrary(self._source, self._plan, state, num_steps)
        engine = self.owned.engage_workers(self._source, library, num_steps)
        engine.start_parties(num_steps, library.stage_digests())
        return engine

    def report_guard(self, guard: GuardReport) -> None:
        """Report the guard's work in a step to the owner of the run."""
        report = asdict(guard) | {"verdicts": guard.verdicts}
        self._tell(say.GuardedStep(**report))

    def guard_metadata(self) -> dict[str, object]:
        """Return the end of the guard's log on the disk, for a sealed state."""
        return log_end_of(self.owned.audit_log)

    def check_guard_metadata(self, metadata: Mapping[str, object]) -> None:
        """As `check_log_end`, of this pipeline's log."""
        check_log_end(self.owned.audit_log, metadata)

    def _report_checks(self, step: int, stages: Mapping[int, StageChecks]) -> None:
        rows = {
            str(stage): {
                "made": sorted(checks.made),
                "party": checks.party,
                "rests_on": None if checks.rests_on is None else sorted(checks.rests_on),
            }
            for stage, checks in stages.items()
        }
        self._tell(say.GuardEvent(event=CHECKED, facts={"step": step, "stages": rows}))


def log_end_of(log: AuditLog) -> dict[str, object]:
    """Where a log ends, on the disk, for a sealed state."""
    return asdict(log.sync_events())


def check_log_end(log: AuditLog, metadata: Mapping[str, object]) -> None:
    """Return where a log has every line that a sealed state knows of, convictions included.

    Args:
        metadata: From `log_end_of` when the state was sealed.
    """
    number, ends = metadata.get("num_events"), metadata.get("digest")
    if not isinstance(number, int) or not isinstance(ends, str):
        raise CheckpointError("sealed state: belongs to an enclave without a pipeline, but this one has a pipeline")
    if not log.contains_head(LogHead(number, ends)):
        raise RollbackError(
            f"{MIDDLE}/{LOG_FILE}: lacks lines that the sealed state requires, maybe a conviction; restore the log "
            "that belongs to it"
        )


class AskedWorkers:
    """The workers of an enclave's pipeline, which the owner of the run starts and ends when it is asked to."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def start_workers(self, configs: Mapping[str, WorkerConfig]) -> None:
        """Ask for workers; their files are made where their keys are."""
        if configs:
            address = next(iter(configs.values())).owner
            self._tell(say.WorkersWanted(names=tuple(configs), address=address))

    def start_fork_server(self, threads: int) -> None:
        """Leave that to the owner of the run."""

    def is_worker_alive(self, name: str) -> bool:
        """Processes are not seen from inside: one that has ended shows by its links."""
        del name
        return True

    def dismiss_worker(self, name: str) -> None:
        """Ask for the end of one worker."""
        self._tell(say.WorkerDismissed(name=name))

    def worker_output(self, name: str) -> str:
        """Its log is where the owner of the run keeps it."""
        return f"see the log of {name}"

    def close(self) -> None:
        """Every worker has been told that the run is over; the owner of the run ends the remaining processes."""
