"""A session's rounds: the owner keeps the model, and processes of sites train it on their own data."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from phalanx.checkpoint.export import RunTokenizer
from phalanx.config import join_names
from phalanx.errors import PeerLostError, TrainingError
from phalanx.federated.enclave.aggregator import AggregatorPort
from phalanx.federated.enclave.process import run_aggregator
from phalanx.federated.rounds.coordinator import RoundCoordinator
from phalanx.federated.rounds.fleet import Fleet
from phalanx.federated.rounds.journal import RoundJournal
from phalanx.federated.rounds.terms import RunTerms
from phalanx.federated.site_trainer import WholeModel
from phalanx.federated.vectors import num_values, shapes_of
from phalanx.models import ModelSource, StageSpec, open_model, stage_table, weights_digest
from phalanx.optimizers import learning_rate
from phalanx.security.crypto import Identity
from phalanx.telemetry import FittedTable, MetricsFile
from phalanx.train.batches.evaluations import SuiteEvaluator
from phalanx.train.batches.preferences import PreferenceMeasure
from phalanx.train.batches.private import round_budget
from phalanx.train.batches.reference import REFERENCE_FILE, ReferenceStore
from phalanx.train.batches.remote_turns import RemoteTurns
from phalanx.train.batches.samples import TextSampler
from phalanx.train.batches.scores import describe_texts
from phalanx.train.batches.site_data import SharedTexts
from phalanx.train.config import FederatedPipelineRun, FederatedRun
from phalanx.train.engines.federated_engine import FederatedEngine, OwnerModel, SiteBudgets
from phalanx.train.saving.savepoint import Savepoint
from phalanx.train.saving.saver import PlainSaver
from phalanx.train.sessions.context import SessionContext
from phalanx.train.sessions.factory import EngineStart, RunMaterial
from phalanx.train.sessions.simulated_sites import SIMULATED, SimulatedSites, simulate_sites
from phalanx.train.sessions.site_carriers import OpenCarrier, await_sites_in_time, open_carrier, site_log_hint
from phalanx.train.sessions.site_file import terms_of
from phalanx.train.setup.preflight import require_extras
from phalanx.train.setup.privacy_outlook import NoiseOutlook, noise_outlooks
from phalanx.train.setup.shown_config import shown_config
from phalanx.train.setup.stage_table import stages_of
from phalanx.train.setup.whole_model import load_whole_model

_JOIN_S = 600.0
"""How long the processes of sites may take to load their model."""
ROUNDS_FILE = "rounds.jsonl"
"""One line a round, and one a measurement of sites, in the run directory."""


def describe_federated(run: FederatedRun, source: ModelSource, cache: Path) -> RenderableType:
    """The resolved config, what crosses in a round, its privacy, and the stages of each site's pipeline.

    Args:
        cache: Of the run: prepared text is kept there, which is read where sites bring noise.
    """
    section = run.federated
    row = stage_table(source.hub_config, (StageSpec(0, 1, 0, source.num_layers),), run.model.adapter)[0]
    how = "secure sums" if section.secure else section.aggregator
    facts = {
        "sites": join_names(section.sites),
        "rounds": str(run.train.steps),
        "local steps": str(section.local_steps),
        "trained": f"{row.trainable:,}",
        "bytes a site and round": f"{2 * 4 * row.trainable:,}",
    }
    title = f"{section.algorithm.kind}, {how}: {section.num_asked} of {len(section.sites)} sites a round"
    table = FittedTable(tuple(facts), [tuple(facts.values())], title=title)
    stages = [stages_of(run.site_pipeline, source)] if isinstance(run, FederatedPipelineRun) else []
    privacy: list[RenderableType] = []
    if section.privacy is not None or run.privacy is not None:
        texts = SharedTexts(run, source, cache / "data", lambda phase, count: None)
        privacy = [
            part
            for outlook in _noise_outlooks(run, load_whole_model(run, source, texts.num_classes), texts)
            for part in (*map(Text, outlook.describe_budget()), *_warning_lines(outlook))
        ]
    return Group(shown_config(run), table, *privacy, *stages)


def _noise_outlooks(run: FederatedRun, model: WholeModel, texts: SharedTexts) -> list[NoiseOutlook]:
    section = run.federated
    # sites of others have rows of their own, and say it themselves
    knows_rows = run.privacy is not None and section.carrier == "loopback"
    fewest = min(texts.share_of(site).num_sequences for site in section.sites) if knows_rows else None
    return noise_outlooks(run, num_values(shapes_of(model.trained)), fewest)


def _warning_lines(outlook: NoiseOutlook) -> list[Text]:
    warning = outlook.noise_warning()
    return [] if warning is None else [Text(warning, style="yellow")]


class FederatedFactory:
    """A factory of the owner and the site processes of a run file."""

    @contextlib.contextmanager
    def prepare_setup(self, context: SessionContext[FederatedRun]) -> Iterator["FederatedSetup"]:
        """Open model and text; sites open their own."""
        run = context.run
        require_extras(run)
        source = open_model(run.model, context.home.cache_directory / "models", run.train.seed)
        context.console.print("preparing text")
        texts = SharedTexts(run, source, context.home.cache_directory / "data", lambda phase, count: None)
        tokenizer, evaluator, sampler, pairs, held_out = None, None, None, None, texts.held_out
        if texts.labelled is not None and run.data.labelled is not None:
            context.figures.texts = describe_texts(texts.labelled, run.data.labelled.task_name, run.train.seed)
            vocabulary = texts.labelled.vocabulary_digest
            tokenizer = RunTokenizer.from_text_tokenizer(
                run.data.tokenizer, source, texts.labelled.tokenizer, context.home.cache_directory / "data"
            )
        else:
            corpus = texts.corpus
            if corpus is None:
                raise TypeError("texts: neither labelled nor a corpus")
            vocabulary, tokenizer = (
                corpus.vocabulary_digest,
                RunTokenizer.from_config(run.data.tokenizer, source, corpus),
            )
            evaluator = SuiteEvaluator.from_run(run, corpus.tokenizer_path, corpus.eos_id, context.home.path)
            sampler = TextSampler.from_run(run, corpus)
        if run.data.preferences is not None:
            store = ReferenceStore(context.home.path / REFERENCE_FILE, context.history.opened)
            held_out = texts.with_references(store, context.print_line)
            pairs = PreferenceMeasure(run, source)
        named = {} if texts.corpus is None else context.validation_sets(source, texts.corpus)
        section = run.federated
        rows = section.num_asked * section.local_steps * run.train.batch_size
        loader = RemoteTurns(rows, run.data.sequence_length)
        material = RunMaterial(source, held_out, loader, named, sampler, vocabulary, tokenizer, evaluator=evaluator)
        model = load_whole_model(run, source, texts.num_classes)
        for outlook in _noise_outlooks(run, model, texts):
            for line in outlook.describe_budget():
                context.print_line(line)
            for warning in _warning_lines(outlook):
                context.console.print(warning, soft_wrap=True)
        simulated = (
            None if run.federated.simulated is None else (load_whole_model(run, source, texts.num_classes), texts)
        )
        yield FederatedSetup(context, material, model, pairs, simulated)


class FederatedSetup:
    """The owner and the sites of one session, before they meet."""

    def __init__(
        self,
        context: SessionContext[FederatedRun],
        material: RunMaterial,
        model: WholeModel,
        pairs: PreferenceMeasure | None,
        simulated: tuple[WholeModel, SharedTexts] | None,
    ) -> None:
        self.material = material
        self._context, self._model, self._pairs, self._simulated = context, model, pairs, simulated

    def recover_state(self, savepoint: Savepoint) -> None:
        """Have the state that the run goes on from as its newest checkpoint."""
        self._context.accept_older(savepoint)

    @contextlib.contextmanager
    def open_engine(self, opening: EngineStart) -> Iterator["RunningRounds"]:
        """Start the sites, wait for them, and give the owner the state that the run goes on from."""
        context, recorder, section = self._context, opening.recorder, self._context.run.federated
        run, home = context.run, context.home
        context.log_opening(recorder, opening.start, self.material.loader, {"sites": list(section.sites)})
        terms = terms_of(run, home.owner, home.pki_directory)
        with contextlib.ExitStack() as stack:
            carrier: OpenCarrier = self._play_sites(terms) or stack.enter_context(open_carrier(context, terms))
            fleet = Fleet(carrier)
            journal = RoundJournal(home.path / "rounds")
            weights, length = self._model.copy_weights(), num_values(shapes_of(self._model.trained))
            budget = round_budget(run, terms.noisy_rounds(length), context.log, context.history.charges)
            if budget is not None:
                context.use_budget(budget)
            summed_by: Identity | AggregatorPort = home.owner
            if section.sums == "enclave":
                aggregator = run_aggregator(terms, shapes_of(self._model.trained), home.path / "aggregator")
                summed_by = stack.enter_context(aggregator)
            coordinator = RoundCoordinator(terms, summed_by, fleet, journal, weights, budget)
            if terms.rows is not None:
                context.check_begins_anew()
                context.figures.budget = SiteBudgets(coordinator, terms.rows)
            rounds = stack.enter_context(MetricsFile(home.path / ROUNDS_FILE))
            rounds.truncate_after(opening.start - 1)
            engine = FederatedEngine(
                coordinator,
                OwnerModel(self._model, self._pairs, self.material.sampler),
                lambda step: learning_rate(run.optimizer, step, run.train.steps),
                rounds,
                recorder,
                budget,
            )
            context.figures.rounds = engine
            if opening.checkpoint is not None:
                engine.load_rounds(opening.checkpoint)
            coordinator.resume_rounds(opening.start)
            context.print_line(f"waiting for {join_names(section.sites)}")
            present_sites = await_sites_in_time(carrier, section.sites, _JOIN_S, context.print_line)
            if len(present_sites) < section.min_cohort:
                missing = join_names(sorted(set(section.sites) - present_sites))
                raise PeerLostError(
                    f"{missing}: did not call within {_JOIN_S:g} s; {site_log_hint(context)}, then --resume"
                )
            saver = PlainSaver(engine.round_shards, opening.savepoint, context.make_observer(recorder))
            yield RunningRounds(engine, saver, context, opening)
            fleet.end_sites()

    def _play_sites(self, terms: RunTerms) -> SimulatedSites | None:
        """Return simulated sites; None where the run's are processes."""
        if self._simulated is None:
            return None
        run, home = self._context.run, self._context.home
        self._context.print_line(SIMULATED)
        return simulate_sites(run, terms, *self._simulated, home.path / "sites", home.pki_directory)


class RunningRounds:
    """Rounds at work."""

    def __init__(
        self, engine: FederatedEngine, saver: PlainSaver, context: SessionContext[FederatedRun], opening: EngineStart
    ) -> None:
        self.engine = self.trained_model = engine
        self.saver = saver
        self._context, self._recorder = context, opening.recorder

    def return_to_checkpoint(self, reason: TrainingError) -> int:
        """Rounds have no holder of a stage to lose."""
        raise reason

    def record_end(self) -> None:
        """Record the digest of the weights."""
        digest = weights_digest(self.engine.round_weights().items())
        self._context.figures.final_weights_digest = digest
        self._recorder.observe_event("run_completed", {"final_weights_digest": digest})
