"""A session's domain: ranks that trust each other, led by this process, and the facts that every rank needs."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Group, RenderableType

from phalanx.checkpoint import Checkpoint, Shard
from phalanx.config import digest_config
from phalanx.errors import CheckpointError, ConfigError, TrainingError
from phalanx.models import LoraConfig, ModelSource, PrefixConfig, open_model, rows_before, stage_table, weights_digest
from phalanx.parallel import (
    Controller,
    LocalRanks,
    ParallelConfig,
    RankEnv,
    RankRecipe,
    RankSaver,
    RankTrainer,
    StepWorkload,
    check_layout,
    find_place,
    fit_layout,
    follow_rank0,
    join_ranks,
    stand_by,
)
from phalanx.parallel.control.rank0 import RankWork
from phalanx.parallel.control.rank_trainer import check_objective
from phalanx.parallel.groups.mesh import Domain, open_domain
from phalanx.parallel.groups.rendezvous import own_device
from phalanx.pipeline import keep_freed_memory
from phalanx.security.privacy import BudgetLedger
from phalanx.telemetry import FittedTable
from phalanx.train.batches.preferences import PreferenceMeasure
from phalanx.train.batches.rollouts import RolloutLoader
from phalanx.train.config import DomainRun, RankedRun
from phalanx.train.engines.domain_deepspeed import check_deepspeed, open_member
from phalanx.train.engines.domain_engine import DomainEngine, GatheredStages
from phalanx.train.records.summary import Figures
from phalanx.train.saving.savepoint import Savepoint
from phalanx.train.saving.saver import DomainSaver
from phalanx.train.sessions.context import SessionContext
from phalanx.train.sessions.factory import EngineStart, RunMaterial
from phalanx.train.sessions.rollouts import rollout_material
from phalanx.train.sessions.texts import text_material
from phalanx.train.setup.layout import check_router_losses, check_virtual_tokens
from phalanx.train.setup.preflight import require_extras
from phalanx.train.setup.row_attention import attention_asked, attention_kind
from phalanx.train.setup.shown_config import shown_config


def recipe_of(run: RankedRun, parallel: ParallelConfig, source: ModelSource) -> RankRecipe:
    """Return the recipe that every rank of a run must know, given the layout for as many ranks as are there."""
    require_extras(run)
    check_virtual_tokens(run, source)
    check_router_losses(run, source)
    return RankRecipe(
        parallel=parallel,
        optimizer=run.optimizer,
        batch_size=run.train.batch_size,
        microbatches=run.train.microbatches,
        sequence_length=run.data.sequence_length,
        total_steps=run.train.steps,
        seed=run.train.seed,
        attention=run.model.attention,
        precision=run.train.precision,
        adapter=run.model.sliced_adapter,
        objective=run.learned_objective,
        attends=attention_kind(run, source),
        neftune_alpha=run.train.neftune_alpha,
        privacy=run.privacy,
        steps_a_rate=run.steps_a_rate,
    )


def play_rank(run: DomainRun, models: Path) -> None:
    """Be a rank other than 0 until the run is over.

    Args:
        models: Directory of models that the run file describes, the same as rank 0's.

    A process that the layout has no rank for stands by until the run is over.
    """
    config, place = run.parallel, find_place(os.environ)
    if place is None:
        raise ConfigError("parallel: this process has no rank; start it with torchrun or `phalanx launch`")
    source = open_model(run.model, models, run.train.seed)
    parallel = fit_layout(config, place.world, source.hub_config_dict, step_workload(run))
    is_needed, place = place.rank < parallel.num_ranks, place.with_world(parallel.num_ranks)
    if not is_needed:
        stand_by(place)
        return
    if place.local_rank == 0:
        # the first of another machine, which rank 0 has not looked at
        check_deepspeed(run, parallel, source, place, build=True)
    keep_freed_memory()
    device = own_device(run.train.device, place)
    with join_domain(run, place, device):
        domain = open_domain(parallel, device)
        with open_member(run, recipe_of(run, parallel, source), source, domain, place) as member:
            follow_rank0(member, _make_rank_saver(run, member, domain))


def describe_domain(run: DomainRun, source: ModelSource) -> RenderableType:
    """The resolved config and the stages of the layout, for the terminal."""
    config = run.parallel
    check_layout(config, source.hub_config_dict, step_workload(run))
    recipe = recipe_of(run, config, source)
    check_objective(recipe)
    check_deepspeed(run, config, source, None)
    specs = recipe.balance_stages(source)
    cells = [
        (
            str(spec.index),
            f"{spec.first_layer}-{spec.end_layer - 1}",
            f"{row.parameters:,}",
            str(spec.index % config.pp),
        )
        for spec, row in zip(specs, stage_table(source.hub_config, specs, run.model.adapter), strict=True)
    ]
    title = f"{config.planned_layout}: {config.num_ranks} ranks, {run.train.microbatches} microbatches"
    table = FittedTable(("stage", "layers", "parameters", "pipeline rank"), cells, title=title)
    return Group(shown_config(run), table)


class DomainFactory:
    """A factory of the ranks of one domain, of which this process is rank 0.

    Args:
        ranks: Number of ranks to start here; the run file's when None.
    """

    def __init__(self, ranks: int | None = None) -> None:
        self._ranks = ranks

    @contextlib.contextmanager
    def prepare_setup(self, context: SessionContext[DomainRun]) -> Iterator["DomainSetup"]:
        """Open model and text, for as many ranks as are there."""
        run = context.run
        source = open_model(run.model, context.home.cache_directory / "models", run.train.seed)
        place = find_place(os.environ)
        world = (self._ranks or run.parallel.num_ranks) if place is None else place.world
        parallel = fit_layout(run.parallel, world, source.hub_config_dict, step_workload(run))
        check_objective(recipe_of(run, parallel, source))
        check_deepspeed(run, parallel, source, place, build=True)
        context.figures.world = parallel.layout_figures
        if run.rewards is not None:
            with rollout_material(context, source) as material:
                yield DomainSetup(context, parallel, place, material)
            return
        material, _ = text_material(context, source)
        yield DomainSetup(context, parallel, place, material)


class DomainSetup:
    """The ranks of one session, before they start.

    Args:
        parallel: The layout for as many ranks as are there.
        place: Place of this process; None where this machine starts all ranks.
    """

    def __init__(
        self, context: SessionContext[DomainRun], parallel: ParallelConfig, place: RankEnv | None, material: RunMaterial
    ) -> None:
        self.material = material
        self._context = context
        self._parallel = parallel
        self._place = place

    def recover_state(self, savepoint: Savepoint) -> None:
        """Have the state that the run goes on from as its newest checkpoint."""
        self._context.adopt_checkpoint(savepoint, _shards_by_name)
        self._context.accept_older(savepoint)

    @contextlib.contextmanager
    def open_engine(self, opening: EngineStart) -> Iterator["RunningDomain"]:
        """Start the ranks, and give them the state that the run goes on from."""
        context, parallel, recorder = self._context, self._parallel, opening.recorder
        unsafe = {"unsafe_public_network": True} if parallel.unsafe_public_network else {}
        facts = {"layout": parallel.planned_layout.parallel_section(), "world": parallel.num_ranks, **unsafe}
        context.log_opening(recorder, opening.start, self.material.loader, facts)
        with contextlib.ExitStack() as stack:
            engine = DomainEngine(stack.enter_context(self._lead_domain()), parallel.dp, self._gather_stages())
            if isinstance(self.material.loader, RolloutLoader):
                self.material.loader.draw_from(lambda: dict(engine.named_parameters()))
            if opening.checkpoint is not None:
                engine.load_checkpoint(opening.checkpoint)
            observe, is_sharded = context.make_observer(recorder), context.run.checkpoint.sharded
            saver = DomainSaver(engine, opening.savepoint, observe, is_sharded=is_sharded)
            stack.callback(saver.close)
            yield RunningDomain(engine, saver, context.figures, opening)

    def _gather_stages(self) -> GatheredStages | None:
        run, source = self._context.run, self.material.source
        if run.data.preferences is None and not self.material.pairs:
            return None
        judge = None if run.data.preferences is None else PreferenceMeasure(run, source)
        return GatheredStages(source, recipe_of(run, self._parallel, source), judge)

    @contextlib.contextmanager
    def _lead_domain(self) -> Iterator[Controller]:
        """Lead all ranks, started here unless a launcher has started them."""
        run, parallel, place = self._context.run, self._parallel, self._place
        keep_freed_memory()
        if parallel.unsafe_public_network:
            self._context.console.print(
                "parallel.unsafe_public_network: anyone who reaches the ranks' ports can run code in them"
            )
        with contextlib.ExitStack() as stack:
            ranks = None
            if place is None:
                ranks, place = self._start_ranks(stack)
            place = place.with_world(parallel.num_ranks)
            device = own_device(run.train.device, place)
            stack.enter_context(join_domain(run, place, device, ranks))
            domain = open_domain(parallel, device)
            source = self.material.source
            recipe, budget = recipe_of(run, parallel, source), self._context.figures.budget
            noise = budget.step.noise_multiplier if isinstance(budget, BudgetLedger) else math.nan
            member = stack.enter_context(open_member(run, recipe, source, domain, place, noise))
            lead = Controller(member, ranks, _make_rank_saver(run, member, domain))
            yield lead
            lead.end_run()

    def _start_ranks(self, stack: contextlib.ExitStack) -> tuple[LocalRanks, RankEnv]:
        home, threads, parallel = self._context.home.path, self._context.run.train.threads, self._parallel
        command = ("phalanx", "train", str(home / "config.toml"), "--run-dir", str(home))
        ranks = LocalRanks(home / "ranks", command, parallel.num_ranks, threads, parallel.silence_s)
        stack.enter_context(ranks)
        ranks.start_ranks()
        return ranks, ranks.place_of(0)


class RunningDomain:
    """A domain at work."""

    def __init__(self, engine: DomainEngine, saver: DomainSaver, figures: Figures, opening: EngineStart) -> None:
        self.engine = self.trained_model = engine
        self.saver = saver
        self._figures = figures
        self._opening, self._recorder = opening, opening.recorder

    def return_to_checkpoint(self, reason: TrainingError) -> int:
        """Give all ranks the state of the last checkpoint; lost ranks start again as a whole elsewhere (ADR 42)."""
        self.saver.wait_for_write()
        checkpoint = self._opening.savepoint.open_newest()
        if checkpoint is None:
            raise reason
        applied = self.engine.num_steps
        step = self._opening.savepoint.rewind_run(checkpoint, self._opening.metrics)
        body = {"from_step": applied, "to_step": step, "steps_lost": applied - step, "reason": str(reason)}
        self._figures.observe("fell_back", body)
        self._recorder.observe_event("fell_back", body)
        self.engine.load_checkpoint(checkpoint)
        return step

    def record_end(self) -> None:
        """Record the digest of the weights."""
        self._figures.final_weights_digest = weights_digest(self.engine.named_parameters())
        self._recorder.observe_event("run_completed", {"final_weights_digest": self._figures.final_weights_digest})


def step_workload(run: RankedRun) -> StepWorkload:
    """Return the load of a run's step on a layout."""
    adapter = run.model.sliced_adapter
    return StepWorkload(
        run.train.batch_size,
        run.train.microbatches,
        run.data.sequence_length,
        adapted=adapter.targets if isinstance(adapter, LoraConfig) else None,
        has_prefix=isinstance(adapter, PrefixConfig),
        num_prompt_tokens=rows_before(adapter),
        is_quantized=run.model.base_quantization is not None,
        optimizer=run.optimizer.kind,
        device=run.train.device,
        attention=run.model.attention,
        attends="documents" if run.data.attention == "document" else attention_asked(run),
    )


def join_domain(
    run: RankedRun, place: RankEnv, device: torch.device, ranks: LocalRanks | None = None
) -> contextlib.AbstractContextManager[None]:
    """Be one of the ranks, by the rules of the run file."""
    config = run.parallel
    return join_ranks(
        place,
        device,
        digest_config(run),
        (lambda: None) if ranks is None else ranks.check_all_run,
        silence_s=config.silence_s,
        unsafe_public_network=config.unsafe_public_network,
    )


def _make_rank_saver(run: DomainRun, member: RankWork, domain: Domain) -> RankSaver | None:
    # a run with [deepspeed] has other members, and is refused before this is asked for
    saves = run.checkpoint.asynchronous or run.checkpoint.sharded
    return RankSaver(member, domain) if saves and isinstance(member, RankTrainer) else None


def _shards_by_name(checkpoint: Checkpoint) -> Iterator[Shard]:
    """Shards of another layout: tensors are found by name, whichever shard they are in."""
    if "updates" in checkpoint.stages_by_tensor():
        raise CheckpointError(f"{checkpoint.path}: its stages skipped different updates; it cannot be continued")
    for stage in checkpoint.stages:
        yield checkpoint.read_shard(stage)
