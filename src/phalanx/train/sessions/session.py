"""One run from its file to its summary: set up, train, finish; the directory is always consistent."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

from rich.console import Console

from phalanx.config import escape_controls
from phalanx.errors import (
    AuditLogError,
    CheckpointError,
    CutLogError,
    DiskError,
    NoHolderError,
    StaleRolloutsError,
    writing_cure,
)
from phalanx.optimizers import OptimizerConfig, learning_rate
from phalanx.telemetry import (
    CurveWriter,
    MetricsFile,
    ProgressDisplay,
    ShownProgress,
    TensorBoardWriter,
    open_tracking,
    read_metrics,
)
from phalanx.telemetry.sinks import TrackedRun
from phalanx.train.batches.rollouts import RolloutLoader
from phalanx.train.config import FederatedRun, RunConfig
from phalanx.train.loop import Loader, run_loop
from phalanx.train.records.audit_trail import LOG_FILE, open_log, reveal_key
from phalanx.train.records.check_record import CheckRecord
from phalanx.train.records.comparison import describe_worse
from phalanx.train.records.failure import describe_failure
from phalanx.train.records.history import read_history
from phalanx.train.records.log_heads import head_in_summary
from phalanx.train.records.past_run import PastRun
from phalanx.train.records.record import GroundTruth, RunningTotals, RunRecorder
from phalanx.train.records.run_directory import RunDirectory, cache_beside, kept_preparations
from phalanx.train.records.stability import ReturnError
from phalanx.train.records.summary import Figures, has_guard, summarise_run
from phalanx.train.records.trust import describe_trust
from phalanx.train.records.unstarted import is_unstarted
from phalanx.train.runs.mixed import MixedBase
from phalanx.train.saving.savepoint import ModelOrigin, RunProgress, Savepoint
from phalanx.train.sessions.context import SessionContext, StartingPoint
from phalanx.train.sessions.factory import EngineFactory, EngineStart, RunningEngine
from phalanx.train.sessions.hooks import OnValidation, RunHooks, ValidationPlan
from phalanx.train.sessions.rollouts import RewardedModel


@final
class Session:
    """A session of ``train``, from start to end, whichever engine runs the steps."""

    def __init__(
        self,
        run: RunConfig,
        home: RunDirectory,
        console: Console,
        factory: EngineFactory[Any],
        beginning: StartingPoint | None = None,
        *,
        on_validation: OnValidation | None = None,
    ) -> None:
        self._run_file = run
        self._home = home
        self._console = console
        self._factory = factory
        self._beginning = beginning or StartingPoint()
        self._on_validation = on_validation
        self._truth = GroundTruth(home.attack_log)

    def run_session(self, *, resume: bool) -> dict[str, Any]:
        """Run to the end; an error or Ctrl-C still leaves a summary that says so.

        Raises:
            AuditLogError: The log is broken, or another process runs here; nothing is touched then.
        """
        home, beginning = self._home, self._beginning
        with open_log(home) as log:
            history = read_history(home.path / LOG_FILE, home.owner.public, home.run_id)
            finished = home.read_summary() if resume and beginning.from_step is None else None
            if finished is not None and history.matches_summary(finished) and home.changes is None:
                self._console.print(f"{home.path}: is complete with all {finished['steps']} steps", markup=False)
                return finished
            run, figures = self._run_file, Figures(checks=CheckRecord(self._run_file.stage_guard))
            context = SessionContext(
                run, home, self._console, log, history, beginning, resume, figures, RunningTotals()
            )
            with self._leaving_summary(context) as summary:
                if not context.asks_workers:
                    context.remove_outdated_files()
                self._train_run(context)
            return summary

    def close_killed(self) -> dict[str, Any]:
        """End a session whose process was killed: its audit key is told, and the log's end is signed.

        Raises:
            AuditLogError: The log is broken, or a process runs here; nothing is touched then.
        """
        home = self._home
        with open_log(home) as log:
            history = read_history(home.path / LOG_FILE, home.owner.public, home.run_id)
            if not history.opened:
                raise CheckpointError(f"{home.path}: no session was begun, so there is none to close")
            summary = home.read_summary()
            if summary is not None and head_in_summary(home.path, home.owner.public, home.run_id) == log.current_head:
                self._print_note(f"{home.path}: its last session is closed already")
                return summary
            run, figures = self._run_file, Figures(checks=CheckRecord(self._run_file.stage_guard))
            totals = RunningTotals()
            for kind, body in history.decisions:
                figures.observe(kind, body)
            newest = history.certified.newest_step
            if newest is not None and not run.checkpoint.encrypt:
                state = PastRun(home.path).open_verified(newest).state
                figures.load_json(state["figures"])
                totals.load_json(state["totals"])
                totals.complete_from(home.path / "metrics.jsonl")
            figures.wall_s, figures.final_weights_digest = totals.wall_s, history.final_weights_digest
            figures.status = "interrupted" if figures.final_weights_digest is None else "completed"
            context = SessionContext(
                run, home, self._console, log, history, self._beginning, resume=True, figures=figures, totals=totals
            )
            return self._leave_summary(context)

    @contextlib.contextmanager
    def _leaving_summary(self, context: SessionContext[RunConfig]) -> Iterator[dict[str, Any]]:
        """Write a summary of the enclosed work, however it ends; its entries are in the given dict."""
        started = time.perf_counter()
        figures, is_whole, summary = context.figures, True, dict[str, Any]()
        try:
            yield summary
            figures.status = "completed"
        except CutLogError:
            # a later signature would contradict the log of the same run
            is_whole = False
            raise
        except KeyboardInterrupt as exc:
            figures.status = "interrupted"
            if is_unstarted(self._home.path):
                self._print_note(f"interrupted before the first step; {kept_preparations(self._home.path)}")
            else:
                self._print_note(str(exc) or "interrupted; continue with --resume")
        except OSError as exc:
            raise CheckpointError(
                f"{exc.filename or self._home.path}: {exc.strerror or exc}; {writing_cure(exc)}, then --resume"
            ) from exc
        finally:
            figures.wall_s += time.perf_counter() - started
            figures.failure = describe_failure(sys.exc_info()[1]) if figures.status == "failed" else None
            summary |= self._leave_summary(context) if is_whole else {}

    def _print_note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _leave_summary(self, context: SessionContext[RunConfig]) -> dict[str, Any]:
        figures, log, history = context.figures, context.log, context.history
        figures.checkpoints = tuple(sorted(history.certified.saved))
        figures.best = history.certified.best
        self._truth.read_new_lies()
        if figures.status != "completed":
            # on a full disk the log cannot grow, and the error that stopped the run is already on its way
            with contextlib.suppress(AuditLogError, DiskError):
                log.append_event("run_stopped", {"status": figures.status})
        reveal_key(log, self._home, history)
        with contextlib.suppress(AuditLogError, DiskError):
            log.sync_events()
        figures.signed_log_head = log.signed_head
        summary = summarise_run(context.run, figures, context.totals, self._truth)
        summary["run_dir"] = str(self._home.path)
        for sentence in (*describe_trust(summary), *describe_worse(summary)):
            self._console.print(escape_controls(sentence), markup=False, highlight=False)
        try:
            self._home.write_summary(summary)
        except CheckpointError as exc:
            if figures.status == "completed":
                raise
            self._console.print(escape_controls(str(exc)), markup=False, highlight=False)
        return summary

    def _train_run(self, context: SessionContext[RunConfig]) -> None:
        run, home, figures, totals = context.run, context.home, context.figures, context.totals
        note = clear_tokens_note(run, home.path)
        if note is not None:
            self._console.print(note, style="yellow", markup=False, highlight=False)
        with self._factory.prepare_setup(context) as setup, contextlib.ExitStack() as stack:
            material = setup.material
            savepoint = Savepoint(
                run,
                home,
                RunProgress(material.loader, figures, totals),
                ModelOrigin(material.source, material.vocabulary),
                context.history,
                context.log,
            )
            setup.recover_state(savepoint)
            checkpoint = savepoint.open_newest() if context.has_earlier_state else None
            metrics = MetricsFile(home.path / "metrics.jsonl")
            if material.tokenizer is not None:
                savepoint.keep_model_files(material.source, material.tokenizer)
            reached = metrics.next_step
            start = savepoint.rewind_run(checkpoint, metrics)
            context.report_lost_steps(reached, start)
            context.keep_changes(start)
            if context.has_earlier_state:
                figures.resumed_from = start
            figures.wall_s = totals.wall_s
            stack.enter_context(metrics)
            board = stack.enter_context(_open_curves(context))
            figures.tracking = board.report
            shown = ShownProgress("round" if isinstance(run, FederatedRun) else "step", has_guard=has_guard(run))
            progress = stack.enter_context(ProgressDisplay(run.train.steps, start, shown=shown, console=self._console))
            recorder = RunRecorder(metrics, context.log, board, progress, self._truth, totals)
            running = stack.enter_context(
                setup.open_engine(EngineStart(start, checkpoint, savepoint, metrics, recorder))
            )
            trained = running.trained_model
            if isinstance(material.loader, RolloutLoader):
                trained = RewardedModel(trained, material.loader)
            validations = ValidationPlan(
                material.validation_sets, self._on_validation, material.leak_meter, material.evaluator, material.pairs
            )
            hooks = RunHooks(run, trained, validations, recorder, running.saver, figures)
            hooks.load_steps(_applied_steps(metrics))
            self._run_steps(run, start, running, material.loader, metrics, hooks)

    def _run_steps(
        self, run: RunConfig, step: int, running: RunningEngine, loader: Loader, metrics: MetricsFile, hooks: RunHooks
    ) -> None:
        """Run all steps from one on; where weights or texts are lost, go on from the checkpoint before."""
        last = run.train.steps
        while True:
            if step == 0:
                hooks.measure_untouched(self._console.print)
            hooks.measure_resumed_leak(step)
            # where it ended early there is no step left, whatever the run file says
            steps = range(step, step if hooks.is_over(step) else last)
            try:
                run_loop(running.engine, loader, steps, run.train, rate_schedule(run.optimizer, last), hooks)
                hooks.report_early_stop()
                running.record_end()
            except (NoHolderError, StaleRolloutsError) as exc:
                # as often as a stage is left without a holder, or texts without the weights that wrote them
                step = running.return_to_checkpoint(exc)
                hooks.redo_steps(step, _applied_steps(metrics))
            except ReturnError as exc:
                step = _pass_batches(exc, running, loader, metrics, hooks)
            else:
                break


def _pass_batches(
    reason: ReturnError, running: RunningEngine, loader: Loader, metrics: MetricsFile, hooks: RunHooks
) -> int:
    """Take the weights back to the last checkpoint and leave the data where it is; return the next step."""
    step, position = reason.step, loader.position_state()
    # without a checkpoint the run stays where it is, and the batch alone is passed
    with contextlib.suppress(ReturnError):
        step = running.return_to_checkpoint(reason)
        hooks.load_steps(_applied_steps(metrics))
    hooks.pass_batches(step, reason)
    loader.load_position(position)
    return step


def _applied_steps(metrics: MetricsFile) -> list[dict[str, Any]]:
    return read_metrics(metrics.path) if metrics.path.exists() else []


def _open_curves(context: SessionContext[RunConfig]) -> CurveWriter:
    run, home = context.run, context.home
    tracked = TrackedRun(home.run_id, run.name, str(home.path), run.flat)
    board = TensorBoardWriter(home.path / "tensorboard")
    return open_tracking(board, run.tracking, tracked, run.home, context.print_line)


def rate_schedule(optimizer: OptimizerConfig, total_steps: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the step."""
    return lambda step: learning_rate(optimizer, step, total_steps)


def clear_tokens_note(run: RunConfig, run_dir: Path) -> str | None:
    """Say that what an encrypted run reads stands in its cache in the clear; None where nothing does."""
    further = isinstance(run, MixedBase) and run.objectives
    if not run.checkpoint.encrypt or (run.data.dataset is not None and not run.data.validation and not further):
        return None
    return (
        f"checkpoint.encrypt does not cover the tokens of the sources, which are in {cache_beside(run_dir)} in the "
        "clear: use an encrypted dataset (phalanx data build with output.key) as data.dataset instead"
    )
