"""One run from its file to its summary: set up, train, finish; what is left behind is always consistent."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console

from phalanx.checkpoint import CertifiedCheckpoints, Checkpoint, Shard
from phalanx.config import digest
from phalanx.data import BatchLoader, Corpus, prepare, unigram_perplexity
from phalanx.engine import Engine
from phalanx.errors import AuditLogError, CheckpointError, ConfigError, CutLogError, DiskError, NoHolderError
from phalanx.models import ModelSource, open_model, weights_digest
from phalanx.optimizers import learning_rate
from phalanx.pipeline import OWNER, AuditDraw, LocalWorkers, Observe, PipelineEngine, StepPlan
from phalanx.security.audit import AuditLog
from phalanx.telemetry import MetricsFile, ProgressDisplay, TensorBoardWriter
from phalanx.train.config import RunConfig
from phalanx.train.loop import Loader, run_loop
from phalanx.train.records.audit_trail import LOG_FILE, open_log, retire_key, reveal_key, rules, step_noter
from phalanx.train.records.check_record import CheckRecord
from phalanx.train.records.ground_truth import GroundTruth
from phalanx.train.records.history import UNDOINGS, RunHistory, read_history
from phalanx.train.records.journal import Journal, collect, discard, newer_entry
from phalanx.train.records.record import RunningTotals, RunRecorder, announcing
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.records.summary import Figures, summarise
from phalanx.train.records.trust import say_trust
from phalanx.train.saving.checkpoint_rollback import Fallback
from phalanx.train.saving.savepoint import Savepoint
from phalanx.train.saving.saver import Saver
from phalanx.train.sessions.cluster import JoinedWorkers, OpenWorkers, engaged, gathered, session_draw, session_name
from phalanx.train.sessions.continue_from import adopted_state, cut_anew
from phalanx.train.sessions.hooks import RunHooks, StagesInTurn
from phalanx.train.setup.guard_outlook import preset_in_words
from phalanx.train.setup.layout import estimate_stages, make_plan
from phalanx.train.setup.stage_source import StageLibrary


class Session:
    """What `train` does, in the order in which it does it."""

    def __init__(
        self,
        run: RunConfig,
        home: RunDirectory,
        console: Console,
        from_step: int | None = None,
        origin: Checkpoint | None = None,
        open_workers: OpenWorkers = LocalWorkers,
        *,
        ranks: int | None = None,
    ) -> None:
        self.config = run
        self.ranks = ranks
        self.open_workers = open_workers
        self.from_step = from_step
        self.origin = origin
        self.saver: Saver | None = None
        self.home = home
        self.console = console
        self.figures = Figures(checks=CheckRecord(run.guard))
        self.name = session_name(home)
        self.asks_workers = False
        self.truth = GroundTruth(home.attack_log)
        self.totals = RunningTotals()

    def run(self, *, resume: bool) -> dict[str, Any]:
        """Run to the end; an error or Ctrl-C still leaves a summary that says so.

        Raises:
            AuditLogError: The log is broken, or another process runs here; nothing is touched then.
        """
        home = self.home
        with open_log(home) as log:
            history = read_history(home.path / LOG_FILE, home.owner.public, home.run_id)
            finished = home.read_summary() if resume and self.from_step is None else None
            if finished is not None and history.is_told_by(finished):
                self.console.print(f"{home.path}: is complete, all {finished['steps']} steps are done")
                return finished
            # they may know lines that somebody has cut off: before they have said so, nothing is written here
            self.asks_workers = resume and bool(self.config.pipeline.remote_workers)
            return self._guarded(log, history)

    def _guarded(self, log: AuditLog, history: RunHistory) -> dict[str, Any]:
        started = time.perf_counter()
        figures, is_whole = self.figures, True
        try:
            if not self.asks_workers:
                self._begin(history)
            self._run(log, history)
            figures.status = "completed"
        except CutLogError:
            # whatever is signed now would be another story of the same run
            is_whole = False
            raise
        except KeyboardInterrupt:
            figures.status = "interrupted"
            self.console.print("interrupted; go on with --resume")
        except OSError as exc:
            raise CheckpointError(
                f"{exc.filename or self.home.path}: {exc.strerror or exc}; free or allow it, then --resume"
            ) from exc
        finally:
            figures.wall_s += time.perf_counter() - started
            summary = self._leave_summary(log, history) if is_whole else {}
        return summary

    def _begin(self, history: RunHistory) -> None:
        # an older summary would speak of an older log
        self.home.remove_summary()
        retire_key(self.home, history)

    def _leave_summary(self, log: AuditLog, history: RunHistory) -> dict[str, Any]:
        figures = self.figures
        figures.checkpoints = tuple(sorted(history.certified.saved))
        self.truth.refresh()
        if figures.status != "completed":
            # on a full disk the log cannot grow, and the error that stopped the run is already on its way
            with contextlib.suppress(AuditLogError, DiskError):
                log.append("run_stopped", {"status": figures.status})
        reveal_key(log, self.home, history)
        with contextlib.suppress(AuditLogError, DiskError):
            log.sync()
        figures.signed_log_head = log.signed_head
        summary = summarise(self.config, figures, self.totals, self.truth)
        summary["run_dir"] = str(self.home.path)
        for line in say_trust(summary):
            self.console.print(line, markup=False, highlight=False)
        try:
            self.home.write_summary(summary)
        except CheckpointError as exc:
            if figures.status == "completed":
                raise
            self.console.print(str(exc))
        return summary

    def _run(self, log: AuditLog, history: RunHistory) -> None:
        run, home = self.config, self.home
        self._recall(history)
        source = open_model(run.model, home.cache / "models", run.train.seed)
        corpus = self._corpus(source)
        plan = make_plan(run, source)
        loader = BatchLoader(corpus, run.train.batch_size, run.train.seed)
        savepoint = Savepoint(
            run, home, loader, self.figures, self.totals, source=source, certified=history.certified, log=log
        )
        workers = [name for name in run.pipeline.workers if name not in history.convicted]
        late = [name for name in run.pipeline.late_workers if name not in history.convicted]
        with contextlib.ExitStack() as stack:

            @functools.cache
            def crowd() -> JoinedWorkers:
                """Workers are started, or awaited, when somebody first needs them."""
                name, opener = self.name, self.open_workers
                with announcing(log, self.console) as say:
                    return stack.enter_context(
                        gathered(
                            run, home, plan, say, session=name, names=workers, late=late, open_workers=opener, log=log
                        )
                    )

            self._find_place(log, history, savepoint, StageLibrary(source, plan, None), crowd)
            goes_on = history.head is not None or self.origin is not None
            checkpoint = savepoint.open() if goes_on else None
            metrics = MetricsFile(home.path / "metrics.jsonl")
            start = savepoint.rewind(checkpoint, metrics)
            if goes_on:
                self.figures.resumed_from = start
            self.figures.wall_s = self.totals.wall_s
            stack.enter_context(metrics)
            board = stack.enter_context(TensorBoardWriter(home.path / "tensorboard"))
            progress = stack.enter_context(ProgressDisplay(run.train.steps, start, console=self.console))
            recorder = RunRecorder(metrics, log, board, progress, self.truth, self.totals)
            draw = session_draw(home, run)
            self._note_opening(recorder, history, self._opening(source, plan, start, workers, draw))
            library = StageLibrary(source, plan, checkpoint)
            journal = self._journal(log, recorder)
            observe = self._observer(recorder, savepoint, history.certified, journal)
            note_checks = self.figures.checks.applied
            engine = stack.enter_context(
                engaged(
                    crowd(),
                    run,
                    home,
                    plan,
                    library,
                    observe,
                    draw=draw,
                    late=late,
                    journal=journal,
                    note_checks=note_checks,
                    note_step=step_noter(log),
                )
            )
            engine.start(
                start,
                library.digests() if run.guard.enabled else {},
                timeout_s=run.pipeline.step_timeout_s,
                patience_s=run.pipeline.patience_s,
            )
            saver = self.saver = Saver(engine, savepoint, observe, journal)
            stack.callback(saver.close)
            hooks = RunHooks(run, StagesInTurn(engine), corpus, recorder, saver, self.figures)
            fallback = Fallback(source, plan, savepoint, saver, metrics, observe)
            ended = False
            while not ended:
                try:
                    self._train(engine, loader, hooks, start)
                    self._finish(engine, recorder)
                    ended = True
                    if journal is not None:
                        journal.remove()
                except NoHolderError as exc:
                    start = fallback.go_back(engine, exc)

    def _recall(self, history: RunHistory) -> None:
        """Count what earlier sessions decided, whichever checkpoint this one goes on from."""
        for kind, body in history.decisions:
            self.figures.observe(kind, body)
        for name in sorted(history.convicted & set(self.config.pipeline.workers)):
            self.console.print(f"{name} was evicted earlier and stays out")

    def _corpus(self, source: ModelSource) -> Corpus:
        run = self.config
        self.console.print("preparing text")
        corpus = prepare(run.data, self.home.cache / "data", run.train.seed, source.tokenizer_path, self._say)
        check_vocabulary(corpus.vocab_size, source)
        self.figures.unigram_perplexity = unigram_perplexity(corpus)
        return corpus

    def _find_place(
        self,
        log: AuditLog,
        history: RunHistory,
        savepoint: Savepoint,
        library: StageLibrary,
        crowd: Callable[[], JoinedWorkers],
    ) -> None:
        """Have the state that the run goes on from as its newest checkpoint."""
        if self.asks_workers:
            crowd()
            self._begin(history)
        self._adopt(log, history, savepoint, lambda origin: cut_anew(origin, library))
        self._accept_older(log, history, savepoint)
        self._recover(log, history, savepoint, library, crowd)

    def _adopt(
        self, log: AuditLog, history: RunHistory, savepoint: Savepoint, cut: Callable[[Checkpoint], Iterable[Shard]]
    ) -> None:
        """Write the first checkpoint of a run that goes on where another one is."""
        if self.origin is None:
            if history.adopted and history.certified.newest is None:
                raise CheckpointError(f"{self.home.path}: --from was interrupted; begin again in another directory")
            return
        state = adopted_state(self.origin, self.config, self.home.run_id)
        # first the log: a crash from here on must not pass for a run that begins from nothing
        log.append("adopted", state["origin"])
        log.sync()
        saved = savepoint.write(self.origin.step, cut(self.origin), state)
        self._tell(log, history, "checkpoint_saved", saved.body())

    def _accept_older(self, log: AuditLog, history: RunHistory, savepoint: Savepoint) -> None:
        """Go back to an older checkpoint, because the user said so."""
        if self.from_step is None:
            return
        savepoint.accept_older(self.from_step)
        self._tell(log, history, "older_accepted", {"step": self.from_step})

    def _recover(
        self,
        log: AuditLog,
        history: RunHistory,
        savepoint: Savepoint,
        library: StageLibrary,
        crowd: Callable[[], JoinedWorkers],
    ) -> None:
        """Where the last session died in the middle of a run: make its last verified step the newest checkpoint."""
        home = self.home
        try:
            entry = newer_entry(home, digest(self.config), history, log) if self.from_step is None else None
            if entry is not None:
                # as with any checkpoint: the log must not be behind it
                self._tell(log, history, "checkpoint", {"step": entry.step})
                log.sync()
                fetch = crowd().fetch_kept if self.config.pipeline.remote_workers else None
                saved = savepoint.write(entry.step, collect(home.journal, entry, library, fetch), entry.state)
                self._tell(log, history, "checkpoint_saved", saved.body())
                self.console.print(f"journal: the run goes on where it died, at step {entry.step}")
        except CheckpointError as exc:
            self.console.print(f"journal: {exc}; the run goes on from its last checkpoint")
        discard(home.journal)

    def _tell(self, log: AuditLog, history: RunHistory, kind: str, body: dict[str, Any]) -> None:
        log.append(kind, body)
        history.certified.take(kind, body)

    def _journal(self, log: AuditLog, recorder: RunRecorder) -> Journal | None:
        if not self.config.journals:
            return None

        def give_up(reason: str) -> None:
            recorder.observe("journal_failed", {"reason": reason})

        return Journal(self.home.journal, self.home.owner, lambda: log.head, give_up)

    def _observer(
        self, recorder: RunRecorder, savepoint: Savepoint, certified: CertifiedCheckpoints, journal: Journal | None
    ) -> Observe:
        def observe(kind: str, body: dict[str, Any]) -> None:
            self.figures.observe(kind, body)
            if kind in UNDOINGS and journal is not None:
                journal.forget()
            if kind == "rolled_back":
                # what came after holds what is being undone, and may be on its way to the disk right now
                if self.saver is not None:
                    self.saver.wait()
                savepoint.forget_after(body["to"])
            certified.take(kind, body)
            recorder.observe(kind, body)

        return observe

    def _train(self, engine: Engine, loader: Loader, hooks: RunHooks, start: int) -> None:
        run = self.config
        if start == 0:
            hooks.begin(self.console.print)
        run_loop(
            engine,
            loader,
            range(start, run.train.steps),
            run.train,
            lambda step: learning_rate(run.optimizer, step, run.train.steps),
            hooks,
        )

    def _finish(self, engine: PipelineEngine, recorder: RunRecorder) -> None:
        figures = self.figures
        parameters = (
            (name, tensor.detach())
            for copy in engine.copies("weights")
            for name, tensor in copy.module.all_parameters().items()
        )
        figures.final_weights_digest = weights_digest(parameters)
        figures.usage = engine.usage
        for doubt in figures.checks.doubts():
            recorder.observe("in_doubt", doubt.to_json())
        recorder.observe("run_completed", {"final_weights_digest": figures.final_weights_digest})

    def _opening(
        self, source: ModelSource, plan: StepPlan, start: int, workers: list[str], draw: AuditDraw
    ) -> dict[str, Any]:
        stages = [
            {key: getattr(row, key) for key in ("index", "layers", "parameters", "holder", "shadow")}
            for row in estimate_stages(self.config, source, workers)
        ]
        guarded = self.config.guard.enabled
        return {
            "config_digest": plan.run_digest,
            "session": self.name,
            "step": start,
            "stages": stages,
            "owner": OWNER,
            "owner_key": self.home.owner.public.public_key.hex(),
            "audit_key_commitment": draw.commitment if guarded else None,
            "audit_nonce": draw.nonce.hex() if guarded else None,
            **rules(self.config, self.home, (*self.config.pipeline.workers, *self.config.pipeline.late_workers)),
        }

    def _note_opening(self, recorder: RunRecorder, history: RunHistory, opening: dict[str, Any]) -> None:
        guard = self.config.guard
        self.console.print(
            f"guard: {guard.mode}" + (f", preset: {preset_in_words(guard)}" if guard.mode == "phalanx" else "")
        )
        recorder.observe("run_started" if history.head is None else "run_resumed", opening)
        if self.config.guard.enabled:
            history.committed.add(opening["audit_key_commitment"])
        if history.head is not None and self.config.guard.enabled:
            self.console.print("audits: a new nonce is in force, nobody can know them from an earlier session")

    def _say(self, phase: str, documents: int) -> None:
        if documents:
            self.console.print(f"  {phase}: {documents} documents", style="dim")


def check_vocabulary(vocab_size: int, source: ModelSource) -> None:
    """Return where a model has an embedding for every token.

    Raises:
        ConfigError: It has not.
    """
    if vocab_size > source.vocab_size:
        raise ConfigError(
            f"data.tokenizer has {vocab_size} tokens, the model {source.vocab_size}; "
            "raise vocab_size in model.architecture or lower it in data.tokenizer"
        )
