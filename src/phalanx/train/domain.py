"""A run inside one trust domain: the same loop, records and checkpoints, with ranks in the place of stages."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table

from phalanx.checkpoint import Certified, Checkpoint, Shard
from phalanx.config import digest, dump_toml
from phalanx.data import BatchLoader
from phalanx.errors import CheckpointError, ConfigError
from phalanx.models import ModelSource, open_model, stage_table, weights_digest
from phalanx.parallel import (
    Lead,
    LocalRanks,
    Member,
    ParallelConfig,
    Place,
    Recipe,
    Workload,
    check_layout,
    find_place,
    follow,
    join,
)
from phalanx.parallel.meeting import own_device
from phalanx.parallel.mesh import open_domain
from phalanx.pipeline import OWNER, Observe, keep_freed_memory
from phalanx.security.audit import AuditLog
from phalanx.telemetry import MetricsFile, Progress, TensorBoardWriter
from phalanx.train.config import RunConfig
from phalanx.train.domain_engine import DomainEngine
from phalanx.train.history import History
from phalanx.train.hooks import RunHooks
from phalanx.train.record import RunRecorder
from phalanx.train.savepoint import Savepoint
from phalanx.train.saver import PlainSaver
from phalanx.train.session import Session


def recipe_of(run: RunConfig) -> Recipe:
    """What every rank of a run must know.

    Raises:
        ConfigError: The run file has no section ``[parallel]``.
    """
    return Recipe(
        parallel=_section(run),
        optimizer=run.optimizer,
        batch_size=run.train.batch_size,
        microbatches=run.train.microbatches,
        sequence_length=run.data.sequence_length,
        total_steps=run.train.steps,
        seed=run.train.seed,
        attention=run.model.attention,
        precision=run.train.precision,
        adapter=run.model.adapter,
    )


def play_rank(run: RunConfig, models: Path) -> None:
    """Be a rank other than 0 until the run is over.

    Args:
        run: The run file of all ranks.
        models: Where models that the run file describes are kept, as rank 0 has it.

    Raises:
        PhalanxError: The model is wrong, or ranks do not fit together.
    """
    config, place = _section(run), find_place(os.environ)
    if place is None or place.world != config.world:
        found = "none" if place is None else str(place.world)
        raise ConfigError(f"parallel: the layout {config.layout} needs {config.world} ranks, {found} were started")
    source = open_model(run.model, models, run.train.seed)
    keep_freed_memory()
    device = own_device(run.train.device, place)
    with join(place, device, digest(run)):
        follow(Member(recipe_of(run), source, open_domain(config, device)))


def describe_domain(run: RunConfig, source: ModelSource) -> RenderableType:
    """The resolved config and the stages of the layout, for the terminal.

    Raises:
        ConfigError: The layout cannot work.
    """
    _check(run, source)
    config = _section(run)
    table = Table(title=f"{config.layout}: {config.world} ranks, {run.train.microbatches} microbatches")
    for name in ("stage", "layers", "parameters", "pipeline rank"):
        table.add_column(name, justify="right")
    specs = recipe_of(run).stages(source)
    for spec, row in zip(specs, stage_table(source.hub_config, specs, run.model.adapter), strict=True):
        layers = f"{spec.first_layer}-{spec.end_layer - 1}"
        table.add_row(str(spec.index), layers, f"{row.parameters:,}", str(spec.index % config.pp))
    return Group(Syntax(dump_toml(run), "toml", background_color="default"), table)


class DomainSession(Session):
    """Rank 0 of a domain: what `train` does with a section ``[parallel]``."""

    def _run(self, log: AuditLog, history: History) -> None:
        run, home = self.config, self.home
        source = open_model(run.model, home.cache / "models", run.train.seed)
        _check(run, source)
        corpus = self._corpus(source)
        loader = BatchLoader(corpus, run.train.batch_size, run.train.seed)
        savepoint = Savepoint(run, home, loader, self.figures, self.totals, source=source, certified=history.certified)
        self._adopt(log, history, savepoint, _as_it_is)
        self._accept_older(log, history, savepoint)
        goes_on = history.head is not None or self.origin is not None
        checkpoint = savepoint.open() if goes_on else None
        metrics = MetricsFile(home.path / "metrics.jsonl")
        start = savepoint.rewind(checkpoint, metrics)
        if goes_on:
            self.figures.resumed_from = start
        self.figures.wall_s = self.totals.wall_s
        with contextlib.ExitStack() as stack:
            stack.enter_context(metrics)
            board = stack.enter_context(TensorBoardWriter(home.path / "tensorboard"))
            progress = stack.enter_context(Progress(run.train.steps, start, console=self.console))
            recorder = RunRecorder(metrics, log, board, progress, self.truth, self.totals)
            recorder.observe("run_started" if history.head is None else "run_resumed", self._domain_opening(start))
            lead = stack.enter_context(self._domain(source))
            engine = DomainEngine(lead, _section(run).dp)
            if checkpoint is not None:
                engine.load(checkpoint)
            saver = PlainSaver(engine.shards, savepoint, self._watching(recorder, history.certified))
            hooks = RunHooks(run, engine, corpus, recorder, saver, self.figures)
            self._train(engine, loader, hooks, start)
            self._end(engine, recorder)

    @contextlib.contextmanager
    def _domain(self, source: ModelSource) -> Iterator[Lead]:
        """All ranks, started here unless somebody else did."""
        run, config = self.config, _section(self.config)
        keep_freed_memory()
        with contextlib.ExitStack() as stack:
            ranks, place = None, find_place(os.environ)
            if place is None:
                ranks, place = self._start_ranks(stack, config)
            if place.world != config.world:
                raise ConfigError(
                    f"parallel: the layout {config.layout} needs {config.world} ranks, {place.world} were started"
                )
            device = own_device(run.train.device, place)
            look = (lambda: None) if ranks is None else ranks.check
            stack.enter_context(join(place, device, digest(run), look))
            lead = Lead(Member(recipe_of(run), source, open_domain(config, device)), ranks)
            yield lead
            lead.end()

    def _start_ranks(self, stack: contextlib.ExitStack, config: ParallelConfig) -> tuple[LocalRanks, Place]:
        home = self.home.path
        command = ("phalanx", "train", str(home / "config.toml"), "--run-dir", str(home))
        ranks = LocalRanks(home / "ranks", command, config.world, self.config.train.threads)
        stack.enter_context(ranks)
        ranks.start()
        return ranks, ranks.place(0)

    def _domain_opening(self, start: int) -> dict[str, Any]:
        config = _section(self.config)
        return {
            "config_digest": digest(self.config),
            "step": start,
            "layout": config.layout.section(),
            "world": config.world,
            "owner": OWNER,
            "owner_key": self.home.owner.public.public_key.hex(),
        }

    def _watching(self, recorder: RunRecorder, certified: Certified) -> Observe:
        def observe(kind: str, body: dict[str, Any]) -> None:
            self.figures.observe(kind, body)
            certified.take(kind, body)
            recorder.observe(kind, body)

        return observe

    def _end(self, engine: DomainEngine, recorder: RunRecorder) -> None:
        self.figures.final_weights_digest = weights_digest(engine.parameters())
        recorder.observe("run_completed", {"final_weights_digest": self.figures.final_weights_digest})


def _section(run: RunConfig) -> ParallelConfig:
    if run.parallel is None:
        raise ConfigError("parallel: the run file has no such section")
    return run.parallel


def _check(run: RunConfig, source: ModelSource) -> None:
    load = Workload(
        run.train.batch_size,
        run.train.microbatches,
        run.data.sequence_length,
        adapted=None if run.model.adapter is None else run.model.adapter.targets,
        optimizer=run.optimizer.kind,
        device=run.train.device,
    )
    check_layout(_section(run), source.hub_config_dict, load)


def _as_it_is(checkpoint: Checkpoint) -> Iterator[Shard]:
    """Shards of another layout: tensors are found by name, whichever shard they are in."""
    if "updates" in checkpoint.names():
        raise CheckpointError(
            f"{checkpoint.path}: its stages have skipped different updates; it cannot be gone on from"
        )
    for stage in checkpoint.stages:
        yield checkpoint.shard(stage)
