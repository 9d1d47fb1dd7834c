"""A pipeline inside another engine: its own log, keys and evidence in a directory of its own, and nothing saved."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Self

from phalanx.config import digest_config
from phalanx.errors import AuditLogError, ConfigError, DiskError
from phalanx.models import ModelSource
from phalanx.pipeline import OWNER, Observe, PipelineEngine, StageChecks, StepPlan
from phalanx.security.audit import AuditLog
from phalanx.train.config import StagedRun
from phalanx.train.records.audit_trail import LOG_FILE, open_log, retire_key, reveal_key, step_noter
from phalanx.train.records.history import read_history
from phalanx.train.records.record import LASTING
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.records.summary import Figures
from phalanx.train.sessions.cluster import (
    JoinedWorkers,
    OpenWorkers,
    join_workers,
    list_participants,
    make_engine,
    new_audit_draw,
    opening_facts,
    session_name,
)
from phalanx.train.setup.stage_source import StageLibrary

NoteApplied = Callable[[int, Mapping[int, StageChecks]], None]
"""Takes the checks of an applied step."""


class OwnedPipeline:
    """The pipeline of a process; as a context manager it gathers the workers, and leaves a log that says how it ended.

    Args:
        run: Run of its workers; `make_plan` makes the plan of it.

    Guarantees:
        The audit key, the draws and the log's key are this process's alone; others learn of them from the log.
    """

    def __init__(
        self,
        run: StagedRun,
        home: RunDirectory,
        plan: StepPlan,
        open_workers: OpenWorkers,
        note: Observe = lambda kind, body: None,
        note_checks: NoteApplied = lambda step, stages: None,
    ) -> None:
        self._run, self._home, self._plan = run, home, plan
        self._open_workers, self._note, self._note_checks = open_workers, note, note_checks
        self.figures = Figures()
        self._session = session_name(home)
        self._history = read_history(home.path / LOG_FILE, home.owner.public, home.run_id)
        self._parties = list_participants(run, home, self._history)
        self._names, self._late = self._parties.names, self._parties.late
        self._stack = contextlib.ExitStack()
        self._log: AuditLog | None = None
        self._joined: JoinedWorkers | None = None
        self._engine: PipelineEngine | None = None

    def __enter__(self) -> Self:
        """Open the log, and wait for the workers."""
        home = self._home
        with contextlib.ExitStack() as stack:
            self._log = stack.enter_context(open_log(home))
            home.remove_summary()
            retire_key(home, self._history)
            for kind, body in self._history.decisions:
                self.figures.observe(kind, body)
            stack.push(self._close_session)
            self._joined = stack.enter_context(
                join_workers(
                    self._run,
                    home,
                    self._plan,
                    self.observe,
                    session=self._session,
                    names=self._names,
                    late=self._late,
                    open_workers=self._open_workers,
                )
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._stack.__exit__(*failure)

    def engage_workers(
        self, source: ModelSource, library: StageLibrary, step: int, beside: Mapping[str, object] | None = None
    ) -> PipelineEngine:
        """Say in the log what begins, and make the engine; no party has a role yet.

        Args:
            beside: Further facts of the log's opening line.
        """
        joined = self._joined
        if joined is None:
            raise ConfigError("an owned pipeline starts after its workers have joined")
        run, home, history = self._run, self._home, self._history
        draw = new_audit_draw(home, run)
        facts = opening_facts(run, home, source, self._names, self._session, draw)
        shared = {"config_digest": digest_config(run), "step": step, "owner": OWNER, **(beside or {})}
        key = {"owner_key": home.owner.public.public_key.hex()}
        self.observe("run_started" if history.head is None else "run_resumed", {**shared, **key, **facts})
        history.committed.add(facts["audit_key_commitment"])
        for body in self._parties.revoked:
            self.observe("revoked", {**body, "step": step})
        self._engine = self._stack.enter_context(
            make_engine(
                joined,
                run,
                home,
                self._plan,
                library,
                self.observe,
                draw=draw,
                late=self._late,
                note_checks=self._note_applied,
                note_step=step_noter(self.audit_log),
            )
        )
        return self._engine

    @property
    def audit_log(self) -> AuditLog:
        """The log."""
        if self._log is None:
            raise AuditLogError("the log of an owned pipeline is not open")
        return self._log

    def observe(self, kind: str, body: dict[str, Any]) -> None:
        """Count an event, and write it into the log."""
        log = self.audit_log
        self.figures.observe(kind, body)
        log.append_event(kind, body)
        if kind in LASTING:
            log.sync_events()
        self._note(kind, body)

    def _note_applied(self, step: int, stages: Mapping[int, StageChecks]) -> None:
        self.figures.checks.note_applied(step, stages)
        self._note_checks(step, stages)

    def _close_session(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Say in the log how the session ended, tell the audit key, and leave a signed end of the log."""
        log, home, engine = self._log, self._home, self._engine
        if log is None:
            return
        is_complete = kind is None and engine is not None and engine.next_step == self._run.train.steps
        status = "completed" if is_complete else "stopped"
        with contextlib.suppress(AuditLogError, DiskError):
            log.append_event("run_completed" if is_complete else "run_stopped", {"status": status})
        reveal_key(log, home, self._history)
        with contextlib.suppress(AuditLogError, DiskError):
            log.sync_events()
        figures = self.figures
        home.write_summary(
            {
                "status": status,
                "verdicts": figures.verdicts,
                "evicted": figures.evicted,
                "lost": figures.lost,
                "replaced": figures.replaced,
                "verdicts_refused": figures.verdicts_refused,
                "takeovers": figures.takeovers,
                "guarantees": figures.guarantees,
                "audit_log_head": {key: log.signed_head[key] for key in ("num_events", "digest")},
                "audit_log_head_signed": log.signed_head,
            }
        )
