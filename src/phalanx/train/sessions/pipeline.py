"""A session's verified pipeline: an owner, its workers, a journal, and the way back to a checkpoint."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.errors import CheckpointError, TrainingError
from phalanx.models import ModelSource, open_model, weights_digest
from phalanx.pipeline import (
    AuditDraw,
    LocalWorkers,
    Observe,
    PipelineEngine,
    RowPrivacy,
    StageChecks,
    StepPlan,
    class_of_session,
)
from phalanx.telemetry import PEERS_FILE, MetricsFile, PeersFile
from phalanx.telemetry.parties import live_parties
from phalanx.train.batches.preferences import PreferenceMeasure
from phalanx.train.batches.private import PrivateBatches
from phalanx.train.batches.rollouts import RolloutLoader
from phalanx.train.batches.validation import measure_perplexities
from phalanx.train.config import PipelineRun
from phalanx.train.records.audit_trail import step_noter
from phalanx.train.records.history import UNDOINGS
from phalanx.train.records.journal import Journal, clear_journal, newer_entry, read_kept_states
from phalanx.train.records.party_book import PartyTracker
from phalanx.train.records.record import RunRecorder, announce_waits
from phalanx.train.saving.savepoint import Savepoint
from phalanx.train.saving.saver import Saver
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
from phalanx.train.sessions.context import SessionContext
from phalanx.train.sessions.continue_from import recut_checkpoint
from phalanx.train.sessions.factory import EngineStart, RunMaterial
from phalanx.train.sessions.hooks import StagesInTurn
from phalanx.train.sessions.rollouts import rollout_material
from phalanx.train.sessions.texts import text_material
from phalanx.train.setup.guard_outlook import idle_guard_warning, preset_in_words
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.stage_source import StageLibrary


@dataclass(frozen=True)
class CheckpointRollback:
    """A rollback of a whole run: loader, figures and metrics here, every stage at the parties that are left.

    Guarantees:
        The run ends with the bits of an undisturbed one, as far as the checkpoint has them. The steps since the
        checkpoint are lost and done again; the event `fell_back` counts them.
    """

    source: ModelSource
    plan: StepPlan
    savepoint: Savepoint
    saver: Saver
    metrics: MetricsFile
    observe: Observe

    def restart_from_checkpoint(self, engine: PipelineEngine, reason: TrainingError) -> int:
        """Begin again from the last checkpoint.

        Raises:
            TrainingError: The given one: without a guard no state is known to be right, and without a
                checkpoint there is none to go back to.
            PeerLostError: No party that is left got ready in time.
        """
        self.saver.drop_collection()
        checkpoint = self.savepoint.open_newest() if self.plan.guard.is_enabled else None
        if checkpoint is None:
            raise reason
        applied = engine.next_step
        step = self.savepoint.rewind_run(checkpoint, self.metrics)
        body = {"from_step": applied, "to_step": step, "steps_lost": applied - step, "reason": str(reason)}
        self.observe("fell_back", body)
        library = StageLibrary(self.source, self.plan, checkpoint)
        engine.fall_back(library, step, library.stage_digests())
        return step


class PipelineFactory:
    """A factory of the verified pipeline of a run file.

    Args:
        open_workers: Starts local workers; another than the default is for drills only.
    """

    def __init__(self, open_workers: OpenWorkers = LocalWorkers) -> None:
        self._open_workers = open_workers

    @contextlib.contextmanager
    def prepare_setup(self, context: SessionContext[PipelineRun]) -> Iterator["PipelineSetup"]:
        """Open model and text; workers join when they are first needed, and are sent home at the end."""
        run = context.run
        _count_past_decisions(context)
        source = open_model(run.model, context.home.cache_directory / "models", run.train.seed)
        plan = make_plan(run, source)
        with contextlib.ExitStack() as stack:
            if run.rewards is not None:
                material = stack.enter_context(rollout_material(context, source))
                yield PipelineSetup(context, plan, material, self._open_workers, stack)
                return
            material, private = text_material(context, source)
            if private is not None:
                plan = plan.model_copy(update={"privacy": _row_privacy(run, private)})
            yield PipelineSetup(context, plan, material, self._open_workers, stack)


class PipelineSetup:
    """The pipeline of one session, before its first step."""

    def __init__(
        self,
        context: SessionContext[PipelineRun],
        plan: StepPlan,
        material: RunMaterial,
        open_workers: OpenWorkers,
        stack: contextlib.ExitStack,
    ) -> None:
        self.material = material
        self._context = context
        self._plan = plan
        self._open_workers = open_workers
        self._stack = stack
        changes = context.home.changes
        # the run as its last session had it, where the layers are cut anew from here on
        self._before_cut = changes.before if changes is not None and changes.cuts_anew else None
        self._name = session_name(context.home)
        self._parties = list_participants(context.run, context.home, context.history)
        self._workers, self._late = self._parties.names, self._parties.late
        self._book = PartyTracker(context.run.name, context.run.train.steps, self._workers, self._late, context.history)
        stack.enter_context(PeersFile(context.home.path / PEERS_FILE, self._book.parties_status))

    @functools.cached_property
    def _joined_workers(self) -> JoinedWorkers:
        """The workers: started, or awaited, at the first use."""
        context = self._context
        with announce_waits(context.log, context.console) as announce:
            say = _track_parties(self._book, announce)
            return self._stack.enter_context(
                join_workers(
                    context.run,
                    context.home,
                    self._plan,
                    say,
                    session=self._name,
                    names=self._workers,
                    late=self._late,
                    open_workers=self._open_workers,
                    log=context.log,
                    say=context.print_line,
                    book=self._book,
                )
            )

    def recover_state(self, savepoint: Savepoint) -> None:
        """Have the state that the run goes on from as its newest checkpoint."""
        context = self._context
        library = StageLibrary(self.material.source, self._plan, None, context.run.model.adapter_directory)
        if context.asks_workers:
            # no bar is there yet, which would show them
            with live_parties(context.console, self._book.party_rows):
                _ = self._joined_workers
            context.remove_outdated_files()
        context.adopt_checkpoint(savepoint, lambda origin: recut_checkpoint(origin, library))
        context.accept_older(savepoint)
        if isinstance(self._before_cut, PipelineRun):
            earlier_plan = make_plan(self._before_cut, self.material.source)
            library = StageLibrary(self.material.source, earlier_plan, None, context.run.model.adapter_directory)
        self._recover_journal(savepoint, library)

    def _recover_journal(self, savepoint: Savepoint, library: StageLibrary) -> None:
        """Where the last session died in the middle of a run: make its last verified step the newest checkpoint."""
        context, home = self._context, self._context.home
        try:
            starts_anew = context.beginning.from_step is None
            entry = newer_entry(home, context.history, context.log) if starts_anew else None
            if entry is not None:
                # as with any checkpoint: the log must not be behind it
                context.log_event("checkpoint", {"step": entry.step})
                context.log.sync_events()
                fetch = self._joined_workers.fetch_kept if context.run.remote_workers else None
                saved = savepoint.write_checkpoint(
                    entry.step, read_kept_states(home.journal_directory, entry, library, fetch), entry.state
                )
                context.log_event("checkpoint_saved", saved.event_body())
                context.print_line(f"journal: the run continues where it ended, at step {entry.step}")
        except CheckpointError as exc:
            context.print_line(f"journal: {exc}; the run continues from its last checkpoint")
        clear_journal(home.journal_directory)

    @contextlib.contextmanager
    def open_engine(self, opening: EngineStart) -> Iterator["RunningPipeline"]:
        """Give every party its role and wait until all copies are where they should be."""
        context, source, plan = self._context, self.material.source, self._plan
        run, home, recorder = context.run, context.home, opening.recorder
        if self._workers:
            recorder.show_parties(self._book)
        draw = new_audit_draw(home, run)
        self._note_opening(recorder, opening.start, draw)
        library = StageLibrary(source, plan, opening.checkpoint, run.model.adapter_directory)
        journal = _open_journal(context, recorder)
        observe = _track_parties(self._book, context.make_observer(recorder))
        events = PipelineEvents(observe, opening.savepoint, journal)
        with contextlib.ExitStack() as stack:
            engine = stack.enter_context(
                make_engine(
                    self._joined_workers,
                    run,
                    home,
                    plan,
                    library,
                    events.observe,
                    draw=draw,
                    late=self._late,
                    journal=journal,
                    note_checks=self._note_checks,
                    note_step=step_noter(context.log, recorder.samples.digest_of_step),
                )
            )
            self._book.watch_roles(engine)
            engine.start_parties(opening.start, library.stage_digests() if run.guard.is_enabled else {})
            saver = events.saver = Saver(engine, opening.savepoint, events.observe, journal)
            stack.callback(saver.close)
            fallback = CheckpointRollback(source, plan, opening.savepoint, saver, opening.metrics, events.observe)
            judge = measure_perplexities if run.data.preferences is None else PreferenceMeasure(run, source)
            trained = StagesInTurn(engine, self.material.sampler, judge)
            if isinstance(self.material.loader, RolloutLoader):
                self.material.loader.draw_from(trained.agreed_weights)
            yield RunningPipeline(engine, trained, saver, fallback, context, recorder)
            if journal is not None:
                journal.remove_directory()

    def _note_checks(self, step: int, stages: Mapping[int, StageChecks]) -> None:
        self._context.figures.checks.note_applied(step, stages)
        self._book.count_checks(step, stages)

    def _note_opening(self, recorder: RunRecorder, start: int, draw: AuditDraw) -> None:
        context, guard = self._context, self._context.run.guard
        context.console.print(
            f"guard: {guard.mode}" + (f", preset: {preset_in_words(guard)}" if guard.mode == "phalanx" else "")
        )
        nobody = idle_guard_warning(context.run)
        if nobody is not None:
            context.console.print(nobody, style="yellow", markup=False, highlight=False)
        source, home = self.material.source, context.home
        facts = opening_facts(context.run, home, source, self._workers, self._name, draw)
        numeric_class = class_of_session(self._plan, self._name) if guard.is_enabled else None
        facts |= {} if numeric_class is None else {"numeric_class": numeric_class}
        context.log_opening(recorder, start, self.material.loader, facts)
        observe = _track_parties(self._book, recorder.observe_event)
        for body in self._parties.revoked:
            observe("revoked", {**body, "step": start})
        if guard.is_enabled:
            context.history.committed.add(facts["audit_key_commitment"])
        if context.history.head is not None and guard.is_enabled:
            context.console.print(
                "audits are drawn from a new key from here on: no earlier session reveals the next draws"
            )


class PipelineEvents:
    """The events of a pipeline: journal and saver learn of undone steps before an event is recorded.

    Attributes:
        saver: Waited for before checkpoints of undone steps are removed; None before there is one.
    """

    def __init__(self, observe: Observe, savepoint: Savepoint, journal: Journal | None) -> None:
        self.saver: Saver | None = None
        self._observe = observe
        self._savepoint = savepoint
        self._journal = journal

    def observe(self, kind: str, body: dict[str, Any]) -> None:
        """Record one event; one that undoes steps first discards the journal's entry and their checkpoints."""
        if kind in UNDOINGS and self._journal is not None:
            self._journal.discard_entry()
        if kind == "rolled_back":
            # what came after holds what is being undone, and may be on its way to the disk right now
            if self.saver is not None:
                self.saver.wait_for_write()
            self._savepoint.forget_after(body["to"])
        self._observe(kind, body)


class RunningPipeline:
    """A pipeline at work."""

    def __init__(
        self,
        engine: PipelineEngine,
        trained: StagesInTurn,
        saver: Saver,
        fallback: CheckpointRollback,
        context: SessionContext[PipelineRun],
        recorder: RunRecorder,
    ) -> None:
        self.engine = engine
        self.trained_model = trained
        self.saver = saver
        self._fallback = fallback
        self._context = context
        self._recorder = recorder

    def return_to_checkpoint(self, reason: TrainingError) -> int:
        """Begin again from the last checkpoint with the remaining parties; see `CheckpointRollback`."""
        return self._fallback.restart_from_checkpoint(self.engine, reason)

    def record_end(self) -> None:
        """Record the digest of the weights, each party's costs, and which steps are in doubt."""
        figures = self._context.figures
        parameters = (
            (name, tensor.detach())
            for copy in self.engine.fetch_stages("weights")
            for name, tensor in copy.module.all_parameters().items()
        )
        figures.final_weights_digest = weights_digest(parameters)
        figures.usage, figures.party_phases = self.engine.party_usage, self.engine.take_party_phases()
        for doubt in figures.checks.list_doubts():
            self._recorder.observe_event("in_doubt", doubt.to_json())
        self._recorder.observe_event("run_completed", {"final_weights_digest": figures.final_weights_digest})


def _row_privacy(run: PipelineRun, private: PrivateBatches) -> RowPrivacy | None:
    """How stages hide rows; what steps are charged for says how much noise that takes."""
    if run.privacy is None:
        return None
    noise = private.ledger.step.noise_multiplier
    return RowPrivacy(clip_norm=run.privacy.clip_norm, noise_multiplier=noise, mean_rows=private.mean_rows)


def _track_parties(book: PartyTracker, observe: Observe) -> Observe:
    def both(kind: str, body: dict[str, Any]) -> None:
        book.observe(kind, body)
        observe(kind, body)

    return both


def _count_past_decisions(context: SessionContext[PipelineRun]) -> None:
    """Count what earlier sessions decided, whichever checkpoint this one goes on from."""
    for kind, body in context.history.decisions:
        context.figures.observe(kind, body)
    for name in sorted(context.history.convicted & set(context.run.pipeline.worker_names)):
        context.print_line(f"{name} was evicted earlier and stays excluded")
    for name in sorted(context.history.revoked & set(context.run.pipeline.worker_names)):
        context.print_line(f"{name} was revoked earlier and stays excluded")


def _open_journal(context: SessionContext[PipelineRun], recorder: RunRecorder) -> Journal | None:
    if not context.run.journals:
        return None

    def give_up(reason: str) -> None:
        recorder.observe_event("journal_failed", {"reason": reason})

    return Journal(context.home.journal_directory, context.home.owner, lambda: context.log.current_head, give_up)
