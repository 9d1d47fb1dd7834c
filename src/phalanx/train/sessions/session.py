"""One run from its file to its summary: set up, train, finish; what is left behind is always consistent."""

import contextlib
import time
from typing import Any, final

from rich.console import Console

from phalanx.errors import AuditLogError, CheckpointError, CutLogError, DiskError, NoHolderError
from phalanx.optimizers import learning_rate
from phalanx.telemetry import MetricsFile, ProgressDisplay, TensorBoardWriter
from phalanx.train.config import RunConfig
from phalanx.train.loop import run_loop
from phalanx.train.records.audit_trail import LOG_FILE, open_log, reveal_key
from phalanx.train.records.check_record import CheckRecord
from phalanx.train.records.ground_truth import GroundTruth
from phalanx.train.records.history import read_history
from phalanx.train.records.record import RunningTotals, RunRecorder
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.records.summary import Figures, summarise
from phalanx.train.records.trust import say_trust
from phalanx.train.saving.savepoint import Savepoint
from phalanx.train.sessions.context import SessionContext, StartingPoint
from phalanx.train.sessions.factory import EngineFactory, EngineSetup, EngineStart, RunMaterial, RunningEngine
from phalanx.train.sessions.hooks import RunHooks


@final
class Session:
    """A session of ``train``, from start to end, whichever engine runs the steps.

    Args:
        run: The run file.
        home: The run directory.
        console: Where progress is shown.
        factory: Makes the engine.
        beginning: Where the run goes on.
    """

    def __init__(
        self,
        run: RunConfig,
        home: RunDirectory,
        console: Console,
        factory: EngineFactory,
        beginning: StartingPoint | None = None,
    ) -> None:
        self._run_file = run
        self._home = home
        self._console = console
        self._factory = factory
        self._beginning = beginning or StartingPoint()
        self._truth = GroundTruth(home.attack_log)

    def run(self, *, resume: bool) -> dict[str, Any]:
        """Run to the end; an error or Ctrl-C still leaves a summary that says so.

        Raises:
            AuditLogError: The log is broken, or another process runs here; nothing is touched then.
        """
        home, beginning = self._home, self._beginning
        with open_log(home) as log:
            history = read_history(home.path / LOG_FILE, home.owner.public, home.run_id)
            finished = home.read_summary() if resume and beginning.from_step is None else None
            if finished is not None and history.is_told_by(finished):
                self._console.print(f"{home.path}: is complete, all {finished['steps']} steps are done")
                return finished
            run, figures = self._run_file, Figures(checks=CheckRecord(self._run_file.guard))
            return self._guarded(
                SessionContext(run, home, self._console, log, history, beginning, resume, figures, RunningTotals())
            )

    def _guarded(self, context: SessionContext) -> dict[str, Any]:
        started = time.perf_counter()
        figures, is_whole = context.figures, True
        try:
            if not context.asks_workers:
                context.begin()
            self._run(context)
            figures.status = "completed"
        except CutLogError:
            # whatever is signed now would be another story of the same run
            is_whole = False
            raise
        except KeyboardInterrupt:
            figures.status = "interrupted"
            self._console.print("interrupted; go on with --resume")
        except OSError as exc:
            raise CheckpointError(
                f"{exc.filename or self._home.path}: {exc.strerror or exc}; free or allow it, then --resume"
            ) from exc
        finally:
            figures.wall_s += time.perf_counter() - started
            summary = self._leave_summary(context) if is_whole else {}
        return summary

    def _leave_summary(self, context: SessionContext) -> dict[str, Any]:
        figures, log, history = context.figures, context.log, context.history
        figures.checkpoints = tuple(sorted(history.certified.saved))
        self._truth.refresh()
        if figures.status != "completed":
            # on a full disk the log cannot grow, and the error that stopped the run is already on its way
            with contextlib.suppress(AuditLogError, DiskError):
                log.append("run_stopped", {"status": figures.status})
        reveal_key(log, self._home, history)
        with contextlib.suppress(AuditLogError, DiskError):
            log.sync()
        figures.signed_log_head = log.signed_head
        summary = summarise(context.run, figures, context.totals, self._truth)
        summary["run_dir"] = str(self._home.path)
        for line in say_trust(summary):
            self._console.print(line, markup=False, highlight=False)
        try:
            self._home.write_summary(summary)
        except CheckpointError as exc:
            if figures.status == "completed":
                raise
            self._console.print(str(exc))
        return summary

    def _run(self, context: SessionContext) -> None:
        run, home, figures, totals = context.run, context.home, context.figures, context.totals
        with self._factory.prepare(context) as setup, contextlib.ExitStack() as stack:
            material = setup.material
            savepoint = Savepoint(
                run,
                home,
                material.loader,
                figures,
                totals,
                source=material.source,
                certified=context.history.certified,
                log=context.log,
            )
            setup.recover(savepoint)
            checkpoint = savepoint.open() if context.goes_on else None
            metrics = MetricsFile(home.path / "metrics.jsonl")
            start = savepoint.rewind(checkpoint, metrics)
            if context.goes_on:
                figures.resumed_from = start
            figures.wall_s = totals.wall_s
            stack.enter_context(metrics)
            board = stack.enter_context(TensorBoardWriter(home.path / "tensorboard"))
            progress = stack.enter_context(ProgressDisplay(run.train.steps, start, console=self._console))
            recorder = RunRecorder(metrics, context.log, board, progress, self._truth, totals)
            self._train(context, setup, EngineStart(start, checkpoint, savepoint, metrics, recorder))

    def _train(self, context: SessionContext, setup: EngineSetup, opening: EngineStart) -> None:
        """Train, and go back to a checkpoint as often as a stage is left without a holder."""
        with setup.open(opening) as running:
            hooks = RunHooks(
                context.run,
                running.trained,
                setup.material.corpus,
                opening.recorder,
                running.saver,
                context.figures,
            )
            step = opening.start
            while True:
                try:
                    self._steps(running, setup.material, hooks, step)
                    running.finish()
                except NoHolderError as exc:
                    step = running.go_back(exc)
                else:
                    return

    def _steps(self, running: RunningEngine, material: RunMaterial, hooks: RunHooks, start: int) -> None:
        run = self._run_file
        if start == 0:
            hooks.begin(self._console.print)
        run_loop(
            running.engine,
            material.loader,
            range(start, run.train.steps),
            run.train,
            lambda step: learning_rate(run.optimizer, step, run.train.steps),
            hooks,
        )
