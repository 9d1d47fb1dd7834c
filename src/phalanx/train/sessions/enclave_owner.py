"""The enclave of a split as the owner of a pipeline: it guards middle stages at workers, with a log of its own."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from phalanx.config import StrictModel, digest
from phalanx.engine import GuardReport
from phalanx.errors import AuditLogError, CheckpointError, ConfigError, DiskError, RollbackError
from phalanx.models import ModelSource
from phalanx.pipeline import OWNER, PipelineEngine, StageChecks, WorkerConfig
from phalanx.security.audit import AuditLog, LogHead
from phalanx.split.channel import messages as say
from phalanx.split.channel.message import SplitMessage
from phalanx.split.processes.local_enclave import EnclaveConfig
from phalanx.split.roles.server import MakeTrainer
from phalanx.split.roles.serving import serve
from phalanx.train.config import RunConfig
from phalanx.train.engines.pipeline_trainer import PipelineTrainer
from phalanx.train.records.audit_trail import LOG_FILE, open_log, retire_key, reveal_key, step_noter
from phalanx.train.records.history import read_history
from phalanx.train.records.record import LASTING
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.records.summary import Figures
from phalanx.train.records.unstarted import MIDDLE
from phalanx.train.sessions.cluster import (
    JoinedWorkers,
    engaged,
    gathered,
    opening_facts,
    participants,
    session_draw,
    session_name,
)
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.process import deterministic
from phalanx.train.setup.stage_source import BackLibrary
from phalanx.transport import Endpoint

CHECKED = "checked"
"""Name under which the enclave tells what was checked of an applied step; no event of the log."""

Tell = Callable[[SplitMessage], None]
"""Sends the owner of the run a message."""


class EnclaveOwnerConfig(StrictModel):
    """The file that an enclave with a pipeline is started with.

    Attributes:
        enclave: As of any enclave.
        run: The run file; the config digest that clients appraise is its digest.
        middle: Directory of the log, the evidence and the keys of the middle stages.
    """

    enclave: EnclaveConfig
    run: RunConfig
    middle: str


def serve_owner(config: EnclaveOwnerConfig) -> None:
    """Be the enclave and the owner of its pipeline until the owner of the run ends the session.

    Raises:
        ConfigError: The file is not of one run.
        PhalanxError: As `phalanx.split.roles.server.serve`; or a worker did not come, or the log is broken.
    """
    run = config.run
    if digest(run) != config.enclave.config_digest:
        raise ConfigError("enclave file: its config digest is of another run than the one in it; start it with the run")
    home = RunDirectory(Path(config.middle), run, resume=True, parties=run.stage_workers)

    @contextlib.contextmanager
    def open_trainer(endpoint: Endpoint, source: ModelSource) -> Iterator[MakeTrainer]:
        def tell(message: SplitMessage) -> None:
            endpoint.send(OWNER, message.kind, message.model_dump(mode="json"))

        with OwnedPipeline(run, home, source, tell) as owned:
            yield lambda whole: PipelineTrainer(whole, owned, source.vocab_size)

    with deterministic(run.train.threads):
        serve(config.enclave, open_trainer=open_trainer)


class OwnedPipeline:
    """The pipeline of an enclave; as a context manager it gathers the workers, and leaves a log that says how it ended.

    Args:
        run: With ``[split]`` and ``[pipeline]``.
        home: Directory of the middle stages.
        source: The model.
        tell: Sends the owner of the run what it is to know and to do.

    Guarantees:
        The audit key, the draws and the log's key are this process's alone; what the owner of the run is told of them
        is what the log says.
    """

    def __init__(self, run: RunConfig, home: RunDirectory, source: ModelSource, tell: Tell) -> None:
        self._run, self._home, self._source, self._tell = run, home, source, tell
        self._figures = Figures()
        self._plan = make_plan(run, source)
        self._session = session_name(home)
        self._history = read_history(home.path / LOG_FILE, home.owner.public, home.run_id)
        self._parties = participants(run, home, self._history)
        self._names, self._late = self._parties.names, self._parties.late
        self._stack = contextlib.ExitStack()
        self._log: AuditLog | None = None
        self._joined: JoinedWorkers | None = None
        self._engine: PipelineEngine | None = None

    def __enter__(self) -> Self:
        """Open the log, and wait for the workers that the owner of the run is asked to start.

        Raises:
            AuditLogError: The log is broken.
            PeerLostError: A worker did not come.
        """
        home = self._home
        with contextlib.ExitStack() as stack:
            self._log = stack.enter_context(open_log(home))
            home.remove_summary()
            retire_key(home, self._history)
            for kind, body in self._history.decisions:
                self._figures.observe(kind, body)
            stack.push(self._leave)
            self._joined = stack.enter_context(
                gathered(
                    self._run,
                    home,
                    self._plan,
                    self._observe,
                    session=self._session,
                    names=self._names,
                    late=self._late,
                    open_workers=lambda directory: contextlib.nullcontext(AskedWorkers(self._tell)),
                )
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._stack.__exit__(*failure)

    def begin(self, state: Mapping[str, Tensor], num_steps: int) -> PipelineEngine:
        """Give every party its stages, cut from the state of the whole back part after so many steps."""
        joined = self._joined
        if joined is None:
            raise ConfigError("the pipeline of an enclave begins once its workers are there")
        run, home, history = self._run, self._home, self._history
        draw = session_draw(home, run)
        facts = opening_facts(run, home, self._source, self._names, self._session, draw)
        shared = {"config_digest": digest(run), "step": num_steps, "owner": OWNER}
        key = {"owner_key": home.owner.public.public_key.hex()}
        self._observe("run_started" if history.head is None else "run_resumed", {**shared, **key, **facts})
        history.committed.add(facts["audit_key_commitment"])
        for body in self._parties.revoked:
            self._observe("revoked", {**body, "step": num_steps})
        library = BackLibrary(self._source, self._plan, state, num_steps)
        engine = self._stack.enter_context(
            engaged(
                joined,
                run,
                home,
                self._plan,
                library,
                self._observe,
                draw=draw,
                late=self._late,
                note_checks=self._checked,
                note_step=step_noter(self._open_log),
            )
        )
        settings = run.pipeline
        engine.start(num_steps, library.digests(), timeout_s=settings.step_timeout_s, patience_s=settings.patience_s)
        self._engine = engine
        return engine

    def report(self, guard: GuardReport) -> None:
        """Tell the owner of the run what the guard did in a step."""
        found = asdict(guard) | {"verdicts": guard.verdicts}
        self._tell(say.GuardedStep(**found))

    def books(self) -> dict[str, object]:
        """Where the log of the guard ends, on the disk: what a sealed state must know of it."""
        return end_of(self._open_log)

    def check_books(self, books: Mapping[str, object]) -> None:
        """As `check_end`, of this pipeline's log."""
        check_end(self._open_log, books)

    @property
    def _open_log(self) -> AuditLog:
        if self._log is None:
            raise AuditLogError("the log of an enclave's pipeline is not open")
        return self._log

    def _observe(self, kind: str, body: dict[str, Any]) -> None:
        log = self._open_log
        self._figures.observe(kind, body)
        log.append(kind, body)
        if kind in LASTING:
            log.sync()
        self._tell(say.GuardEvent(event=kind, facts=body))

    def _checked(self, step: int, stages: Mapping[int, StageChecks]) -> None:
        self._figures.checks.applied(step, stages)
        found = {
            str(stage): {
                "made": sorted(one.made),
                "party": one.party,
                "rests_on": None if one.rests_on is None else sorted(one.rests_on),
            }
            for stage, one in stages.items()
        }
        self._tell(say.GuardEvent(event=CHECKED, facts={"step": step, "stages": found}))

    def _leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Say in the log how the session ended, tell the audit key, and leave a signed end of the log."""
        log, home, engine = self._log, self._home, self._engine
        if log is None:
            return
        is_complete = kind is None and engine is not None and engine.next_step == self._run.train.steps
        status = "completed" if is_complete else "stopped"
        with contextlib.suppress(AuditLogError, DiskError):
            log.append("run_completed" if is_complete else "run_stopped", {"status": status})
        reveal_key(log, home, self._history)
        with contextlib.suppress(AuditLogError, DiskError):
            log.sync()
        figures = self._figures
        home.write_summary(
            {
                "status": status,
                "verdicts": figures.verdicts,
                "evicted": figures.evicted,
                "lost": figures.lost,
                "takeovers": figures.takeovers,
                "guarantees": figures.guarantees,
                "audit_log_head": {key: log.signed_head[key] for key in ("num_events", "digest")},
                "audit_log_head_signed": log.signed_head,
            }
        )


def end_of(log: AuditLog) -> dict[str, object]:
    """Where a log ends, on the disk, for a sealed state."""
    return asdict(log.sync())


def check_end(log: AuditLog, books: Mapping[str, object]) -> None:
    """Return where a log has every line that a sealed state knows of, convictions included.

    Args:
        log: Of the guard of middle stages.
        books: As `end_of` made them when the state was sealed.

    Raises:
        CheckpointError: They are no books of an enclave that owns a pipeline.
        RollbackError: The log was turned back, or exchanged.
    """
    number, ends = books.get("num_events"), books.get("digest")
    if not isinstance(number, int) or not isinstance(ends, str):
        raise CheckpointError("sealed state: is of an enclave that owns no pipeline, and this one does")
    if not log.contains(LogHead(number, ends)):
        raise RollbackError(
            f"{MIDDLE}/{LOG_FILE}: lacks lines that the sealed state knows of, maybe a conviction; put back the log "
            "that belongs to it"
        )


class AskedWorkers:
    """The workers of an enclave's pipeline, which the owner of the run starts and ends when it is asked to.

    Args:
        tell: Sends the owner of the run a message.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def start(self, configs: Mapping[str, WorkerConfig]) -> None:
        """Ask for workers; their files are made where their keys are."""
        if configs:
            address = next(iter(configs.values())).owner
            self._tell(say.WorkersWanted(names=tuple(configs), address=address))

    def start_fork_server(self, threads: int) -> None:
        """Leave that to the owner of the run."""

    def is_alive(self, name: str) -> bool:
        """Processes are not seen from inside: one that has ended shows by its links."""
        del name
        return True

    def dismiss(self, name: str) -> None:
        """Ask for the end of one worker."""
        self._tell(say.WorkerDismissed(name=name))

    def last_output(self, name: str) -> str:
        """Its log is where the owner of the run keeps it."""
        return f"see the log of {name}"

    def close(self) -> None:
        """Every worker has been told that the run is over; the owner of the run ends what is left."""
