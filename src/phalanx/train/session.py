"""One run from its file to its summary: set up, train, finish; what is left behind is always consistent."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from phalanx.checkpoint import Checkpoint, Shard, latest_checkpoint, open_checkpoint, save_checkpoint
from phalanx.config import digest
from phalanx.data import BatchLoader, Corpus, prepare, unigram_perplexity, validation_batches
from phalanx.errors import CheckpointError, ConfigError, PhalanxError
from phalanx.models import ModelSource, open_model, weights_digest
from phalanx.optimizers import learning_rate
from phalanx.pipeline import OWNER, AuditDraw, PipelineEngine, StepPlan, settle_numerics
from phalanx.pipeline import Observe
from phalanx.security.audit import AuditLog
from phalanx.telemetry import MetricsFile, Progress, TensorBoardWriter, read_metrics
from phalanx.train.company import company
from phalanx.train.config import RunConfig
from phalanx.train.ground_truth import GroundTruth
from phalanx.train.layout import describe_stages, estimate_stages, make_plan
from phalanx.train.library import StageLibrary
from phalanx.train.loop import run_loop
from phalanx.train.record import RunRecorder, Totals
from phalanx.train.run_directory import RunDirectory
from phalanx.train.summary import Figures, summarise
from phalanx.train.validation import perplexity


def train(
    run: RunConfig, run_dir: str | Path | None = None, *, resume: bool = False, console: Console | None = None
) -> dict[str, Any]:
    """Train what a run file says.

    Args:
        run: From `load_run`.
        run_dir: Where everything goes; ``runs/NAME`` when left out.
        resume: Go on from the last good checkpoint in `run_dir`.
        console: Where progress is shown; standard output when left out.

    Returns:
        What ``summary.json`` holds, and ``run_dir``.

    Raises:
        PhalanxError: As the tree in `phalanx.errors` says; the summary then has the status "failed".
    """
    settle_numerics(run.train.threads)
    home = RunDirectory(Path(run_dir or Path("runs") / run.name), run, resume=resume)
    session = Session(run, home, console or Console())
    with _interruptible():
        return session.run(resume=resume)


def describe(run: RunConfig, run_dir: str | Path | None = None) -> RenderableType:
    """The resolved config, the stage table and the expected memory; trains nothing."""
    cache = Path(run_dir or Path("runs") / run.name).parent / ".cache"
    return describe_stages(run, open_model(run.model, cache / "models", run.train.seed))


class Session:
    """What `train` does, in the order in which it does it."""

    def __init__(self, run: RunConfig, home: RunDirectory, console: Console) -> None:
        self.config = run
        self.home = home
        self.console = console
        self.figures = Figures()
        self.truth = GroundTruth(home.attack_log)
        self.totals = Totals()

    def run(self, *, resume: bool) -> dict[str, Any]:
        """Run to the end; an error or Ctrl-C still leaves a summary that says so."""
        started = time.perf_counter()
        # an older summary would speak of an older log
        (self.home.path / "summary.json").unlink(missing_ok=True)
        try:
            self._run(resume)
            self.figures.status = "completed"
        except KeyboardInterrupt:
            self.figures.status = "interrupted"
            self.console.print("interrupted; go on with --resume")
        except PhalanxError:
            self.figures.status = "failed"
            raise
        finally:
            self.figures.wall_s = time.perf_counter() - started
            self.truth.refresh()
            summary = summarise(self.config, self.figures, self.totals, self.truth)
            summary["run_dir"] = str(self.home.path)
            self.home.write_summary(summary)
        return summary

    def _run(self, resume: bool) -> None:
        run, home = self.config, self.home
        source = open_model(run.model, home.cache / "models", run.train.seed)
        self.console.print("preparing text")
        corpus = prepare(run.data, home.cache / "data", run.train.seed, source.tokenizer_path, self._say)
        self._check_vocabulary(source, corpus)
        plan = make_plan(run, source)
        checkpoint = self._checkpoint() if resume else None
        loader = BatchLoader(corpus, run.train.batch_size, run.train.seed)
        start = self._rewind(checkpoint, loader)
        library = StageLibrary(source, plan, checkpoint)
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(AuditLog(home.path / "events.jsonl", home.owner, home.run_id))
            board = stack.enter_context(TensorBoardWriter(home.path / "tensorboard"))
            metrics = MetricsFile(home.path / "metrics.jsonl")
            progress = stack.enter_context(Progress(run.train.steps, start, console=self.console))
            recorder = RunRecorder(metrics, log, board, progress, self.truth, self.totals)
            log.append("run_resumed" if resume else "run_started", self._opening(source, plan, start))
            engine = stack.enter_context(company(run, home, plan, library, self._observer(recorder)))
            engine.start(start, library.digests() if run.guard.enabled else {}, timeout_s=run.pipeline.step_timeout_s)
            self._train(engine, loader, corpus, recorder, start)
            self._finish(engine, recorder)

    def _observer(self, recorder: RunRecorder) -> Observe:
        def observe(kind: str, body: dict[str, object]) -> None:
            self.figures.observe(kind, body)
            recorder.observe(kind, body)

        return observe

    def _train(
        self, engine: PipelineEngine, loader: BatchLoader, corpus: Corpus, recorder: RunRecorder, start: int
    ) -> None:
        run, figures = self.config, self.figures
        figures.unigram_perplexity = unigram_perplexity(corpus)
        if start == 0:
            figures.validation_first = self._validate(engine, corpus, recorder, 0)

        def after_step(done: int) -> None:
            last = done == run.train.steps
            every = run.train.validate_every
            if last or (every and done % every == 0):
                figures.validation_last = self._validate(engine, corpus, recorder, done)
            if last or (run.checkpoint.every and done % run.checkpoint.every == 0):
                self._save(engine, loader, recorder, done)

        run_loop(
            engine,
            loader,
            range(start, run.train.steps),
            num_microbatches=run.train.microbatches,
            learning_rate=lambda step: learning_rate(run.optimizer, step, run.train.steps),
            recorder=recorder,
            after_step=after_step,
        )

    def _validate(self, engine: PipelineEngine, corpus: Corpus, recorder: RunRecorder, done: int) -> float:
        modules = (copy.module for copy in engine.copies("weights"))
        value = perplexity(modules, validation_batches(corpus, 8))
        recorder.validated(value, done)
        self.console.print(f"step {done}: validation perplexity {value:.1f}")
        return value

    def _save(self, engine: PipelineEngine, loader: BatchLoader, recorder: RunRecorder, done: int) -> None:
        state = {
            "run": self.home.run_id,
            "config_digest": digest(self.config),
            "step": done,
            "loader": loader.state(),
            "figures": self.figures.to_json(),
            "totals": {"tokens": self.totals.tokens, "audits": self.totals.audits, "alarms": self.totals.alarms},
        }
        recorder.log.append("checkpoint", {"step": done})
        recorder.log.sync()
        shards = (Shard(copy.spec.index, copy.optimizer.state(), copy.step) for copy in engine.copies("state"))
        save_checkpoint(
            self.home.checkpoints, done, shards, state, sign=self.home.owner, keep=self.config.checkpoint.keep
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
        recorder.log.append("run_completed", {"final_weights_digest": figures.final_weights_digest})
        head = recorder.log.head
        figures.audit_log_head = {"num_events": head.num_events, "digest": head.digest}

    def _checkpoint(self) -> Checkpoint | None:
        path = latest_checkpoint(self.home.checkpoints)
        if path is None:
            return None
        peer = self.home.owner.public
        return open_checkpoint(path, peer, run=self.home.run_id, config_digest=digest(self.config))

    def _rewind(self, checkpoint: Checkpoint | None, loader: BatchLoader) -> int:
        """Take loader, figures and metrics back to the checkpoint; step 0 when there is none."""
        metrics = MetricsFile(self.home.path / "metrics.jsonl")
        start = 0 if checkpoint is None else checkpoint.step
        metrics.truncate_after(start - 1)
        if checkpoint is None:
            return 0
        try:
            loader.load_state(checkpoint.state["loader"])
            self.figures.load_json(checkpoint.state["figures"])
            for name, value in checkpoint.state["totals"].items():
                setattr(self.totals, name, int(value))
        except (KeyError, TypeError, AttributeError) as exc:
            raise CheckpointError(f"{checkpoint.path}: its state lacks {exc}; use an older checkpoint") from exc
        lines = read_metrics(metrics.path)
        self.totals.losses = [float(line["loss"]) for line in lines if line.get("loss") is not None]
        self.totals.wall_s = sum(float(line["wall_s"]) for line in lines)
        self.figures.resumed_from = start
        return start

    def _opening(self, source: ModelSource, plan: StepPlan, start: int) -> dict[str, Any]:
        stages = [
            {"index": row.index, "layers": row.layers, "parameters": row.parameters, "holder": row.holder, "shadow": row.shadow}
            for row in estimate_stages(self.config, source)
        ]
        key = self.home.audit_key() if self.config.guard.enabled else None
        return {
            "config_digest": plan.run_digest,
            "step": start,
            "stages": stages,
            "owner": OWNER,
            "owner_key": self.home.owner.public.public_key.hex(),
            "audit_key_commitment": None if key is None else AuditDraw(key, self.config.guard.audit_rate).commitment,
        }

    def _check_vocabulary(self, source: ModelSource, corpus: Corpus) -> None:
        if corpus.vocab_size > source.vocab_size:
            raise ConfigError(
                f"data.tokenizer has {corpus.vocab_size} tokens, the model {source.vocab_size}; "
                "raise vocab_size in model.architecture or lower it in data.tokenizer"
            )

    def _say(self, phase: str, documents: int) -> None:
        if documents:
            self.console.print(f"  {phase}: {documents} documents", style="dim")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does; only the main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)
