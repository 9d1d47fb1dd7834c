"""A session's split: an owner and clients with a frozen front, and an enclave with the rest."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from safetensors.torch import save_file

from phalanx.checkpoint import Shard
from phalanx.checkpoint.export import RunTokenizer
from phalanx.data import Corpus
from phalanx.data.config import OWN_TASK, BpeConfig
from phalanx.data.loader import HeldOut, Sequences
from phalanx.data.preferences import PairCorpus
from phalanx.data.tokenizers import load_tokenizer
from phalanx.errors import ReleaseRefusedError, TrainingError
from phalanx.models import ModelSource, open_model, stage_table, weights_digest
from phalanx.models.layout import check_vocabulary
from phalanx.pipeline import LocalWorkers, Observe
from phalanx.security.crypto import RevokedParties
from phalanx.split import ENCLAVE, SplitConfig, SplitDriver, cut_model
from phalanx.split.channel.message import SplitMessage
from phalanx.split.check import check_split
from phalanx.split.hardware.tier import describe_protection
from phalanx.split.roles.remote_lead import RemoteLead
from phalanx.telemetry import FittedTable
from phalanx.train.batches.client_loader import ClientLoader
from phalanx.train.batches.evaluations import SuiteEvaluator
from phalanx.train.batches.labelled import LabelledTexts, prepare_labelled
from phalanx.train.batches.remote_turns import RemoteTurns
from phalanx.train.batches.scores import describe_texts
from phalanx.train.config import SplitPipelineRun, SplitRun
from phalanx.train.engines.split_engine import LocalClients, RemoteClients, SplitEngine
from phalanx.train.records.record import RunRecorder
from phalanx.train.records.run_directory import ADAPTERS
from phalanx.train.records.unstarted import MIDDLE
from phalanx.train.saving.savepoint import Savepoint
from phalanx.train.saving.saver import PlainSaver
from phalanx.train.sessions.cluster import OpenWorkers
from phalanx.train.sessions.context import SessionContext
from phalanx.train.sessions.factory import EngineStart, RunMaterial
from phalanx.train.sessions.middle_stages import (
    WORKERS_SEE,
    count_logged_decisions,
    middle_directory,
    middle_stages,
    note_guard_events,
)
from phalanx.train.sessions.remote_company import remote_company
from phalanx.train.sessions.split_cluster import enclave_of, num_classes_of, split_company
from phalanx.train.sessions.split_parties import AppraisedClients, RefusedClients, SplitRevocations
from phalanx.train.setup.row_attention import attends_in_documents
from phalanx.train.setup.shown_config import shown_config
from phalanx.train.setup.stage_table import stages_of


def describe_split(run: SplitRun, source: ModelSource) -> RenderableType:
    """The resolved config, the two parts and what stands behind the enclave, for the terminal."""
    _check_run(run, source)
    split = run.split
    title = f"{split.mode} split, {split.clients} clients; {describe_protection(split)}"
    specs = cut_model(source.num_layers, split.cut)
    item_bytes = 4 if split.wire == "fp32" else 2
    crossing = run.train.batch_size * run.data.sequence_length * (source.hidden_size * item_bytes + 8)
    rows = stage_table(source.hub_config, specs, run.model.adapter)
    cells = []
    for name, row, trained, size in (("client", rows[0], 0, f"{crossing:,} out"), ("enclave", rows[1], None, "")):
        layers = f"{row.first_layer}-{row.end_layer - 1}"
        count = row.trainable if trained is None else trained
        cells.append((name, layers, f"{row.parameters:,}", f"{count:,}", size))
    heads = ("part", "layers", "parameters", "trained", "bytes a step")
    table = FittedTable(heads, cells, title=f"{title}; {WORKERS_SEE}" if isinstance(run, SplitPipelineRun) else title)
    toml = shown_config(run)
    return Group(toml, table, stages_of(run, source)) if isinstance(run, SplitPipelineRun) else Group(toml, table)


class SplitFactory:
    """A factory of the owner, the clients and the enclave of a run file.

    Args:
        open_workers: Starts the workers of an enclave's pipeline; another than the default is for drills only.
    """

    def __init__(self, open_workers: OpenWorkers = LocalWorkers) -> None:
        self._open_workers = open_workers

    @contextlib.contextmanager
    def prepare_setup(self, context: SessionContext[SplitRun]) -> Iterator["SplitSetup | RemoteSetup"]:
        """Open model and text, and say what stands behind the enclave; remote clients have the text."""
        run, split = context.run, context.run.split
        source = open_model(run.model, context.home.cache_directory / "models", run.train.seed)
        _check_run(run, source)
        context.console.print(describe_protection(split), style="bold", markup=False, highlight=False)
        context.figures.split = {"mode": split.mode, "tier": _attested_tier(split), "worth": describe_protection(split)}
        if isinstance(run, SplitPipelineRun):
            context.console.print(WORKERS_SEE, style="bold", markup=False, highlight=False)
            context.figures.split |= {"workers_see": WORKERS_SEE, "middle": MIDDLE}
            count_logged_decisions(middle_directory(run, context.home), context.figures)
        if split.remote_clients:
            turns = RemoteTurns(run.train.batch_size, run.data.sequence_length)
            if run.data.labelled is not None:
                context.figures.texts = {"task": OWN_TASK, "classes": num_classes_of(run)}
            tokenizer = _remote_tokenizer(context, source)
            yield RemoteSetup(context, RunMaterial(source, turns, turns, tokenizer=tokenizer), turns)
            return
        labelled = _prepare_task(context, source)
        corpus = labelled or context.prepare_corpus(source)
        sizes = (run.train.draws_per_step, run.train.microbatches, run.train.seed)
        drawn_from = _drawn_from(corpus, split.client_names)
        loader = ClientLoader(drawn_from, split.client_names, *sizes)
        named: Mapping[str, HeldOut] = {}
        evaluator = None
        if isinstance(corpus, Corpus):
            named = context.validation_sets(source, corpus)
            evaluator = SuiteEvaluator.from_run(run, corpus.tokenizer_path, corpus.eos_id, context.home.path)
        if isinstance(corpus, LabelledTexts):
            tokenizer = RunTokenizer.from_text_tokenizer(
                run.data.tokenizer, source, corpus.tokenizer, context.home.cache_directory / "data"
            )
        else:
            tokenizer = RunTokenizer.from_config(run.data.tokenizer, source, corpus)
        material = RunMaterial(
            source,
            corpus,
            loader,
            named,
            vocabulary=corpus.vocabulary_digest,
            tokenizer=tokenizer,
            evaluator=evaluator,
        )
        yield SplitSetup(context, material, labelled, self._open_workers)


class SplitSetup:
    """The clients and the enclave of one session, before they meet.

    Args:
        labelled: Labelled texts of a classification; None of any other task.
        open_workers: Starts the workers of an enclave that owns a pipeline.
    """

    def __init__(
        self,
        context: SessionContext[SplitRun],
        material: RunMaterial,
        labelled: LabelledTexts | None,
        open_workers: OpenWorkers,
    ) -> None:
        self.material = material
        self._context = context
        self._num_classes = 0 if labelled is None else len(labelled.classes)
        self._holders = () if labelled is None else labelled.holders
        self._open_workers = open_workers

    def recover_state(self, savepoint: Savepoint) -> None:
        """Find nothing to recover: a sealed state is good while it is the newest, and of this run alone."""
        del savepoint

    @contextlib.contextmanager
    def open_engine(self, opening: EngineStart) -> Iterator["RunningSplit"]:
        """Start the enclave, have every party meet it, and give it its sealed state."""
        context, recorder, split = self._context, opening.recorder, self._context.run.split
        run, home, observe = context.run, context.home, context.make_observer(recorder)
        facts: dict[str, Any] = {"mode": split.mode, "tier": _attested_tier(split), "clients": list(split.client_names)}
        if isinstance(run, SplitPipelineRun):
            facts |= {"workers": list(run.stage_workers), "workers_see": WORKERS_SEE, "middle": MIDDLE}
        context.log_opening(recorder, opening.start, self.material.loader, facts)
        note = note_guard_events(context.figures, opening.savepoint, observe)
        refused = _collect_refusals(context, recorder, observe)
        with (
            middle_stages(run, home, self._open_workers, note) as middle,
            split_company(run, home, self.material.source, self._num_classes, middle, refused.take_refusal) as lead,
        ):
            learns_pairs = run.train.learns_pairs
            clients = LocalClients(lead, self._num_classes, self._holders, learns_pairs=learns_pairs)
            engine = SplitEngine(lead, clients)
            with _run_split(context, opening, observe, lead, engine) as running:
                yield running


class RemoteSetup:
    """The owner of clients and an enclave of others, before they meet."""

    def __init__(self, context: SessionContext[SplitRun], material: RunMaterial, turns: RemoteTurns) -> None:
        self.material = material
        self._context, self._turns = context, turns

    def recover_state(self, savepoint: Savepoint) -> None:
        """Find nothing to recover, as `SplitSetup`."""
        del savepoint

    @contextlib.contextmanager
    def open_engine(self, opening: EngineStart) -> Iterator["RunningSplit"]:
        """Call the enclave, wait for it and for all clients, and give it its sealed state."""
        context, recorder, split = self._context, opening.recorder, self._context.run.split
        observe = context.make_observer(recorder)
        facts = {"mode": split.mode, "tier": _attested_tier(split), "clients": list(split.client_names), "remote": True}
        context.log_opening(recorder, opening.start, self.material.loader, facts)
        parties, listed = (ENCLAVE, *split.client_names), RevokedParties(context.home.pki_directory)
        revoked = SplitRevocations(parties, listed.read_revocations, context.history.revoked, observe)
        revoked.check_revocations(opening.start)
        refused, num_classes = _collect_refusals(context, recorder, observe), num_classes_of(context.run)
        appraised = AppraisedClients(split, observe)
        if split.client_policies and context.figures.split is not None:
            context.figures.split["appraised_clients"] = appraised.facts

        def aside(message: SplitMessage) -> bool:
            return appraised.take_appraisal(message) or refused.take_refusal(message)

        with remote_company(context.run, context.home, num_classes, context.print_line, aside) as lead:
            appraised.check_all_appraised()
            self._turns.take_commitments(lead.commitments)
            recorder.observe_event("clients_ready", {"commitments": dict(lead.commitments)})
            engine = SplitEngine(lead, RemoteClients(lead, self._turns, revoked.check_revocations))
            with _run_split(context, opening, observe, lead, engine) as running:
                yield running


@contextlib.contextmanager
def _run_split(
    context: SessionContext[SplitRun],
    opening: EngineStart,
    observe: Observe,
    lead: SplitDriver | RemoteLead,
    engine: SplitEngine,
) -> Iterator["RunningSplit"]:
    """Record the appraisal, go on from the checkpoint, and report the costs however it ends."""
    recorder = opening.recorder
    for party in lead.enclave_peers:
        if party.latest_appraisal is not None:
            recorder.observe_event(
                "enclave_appraised", {"party": party.name, "result": party.latest_appraisal.to_json()}
            )
    if opening.checkpoint is not None:
        engine.load_sealed(opening.checkpoint)

    def shards() -> Iterable[Shard]:
        # a release leaves once a kept state counts it: the run's last state is that
        if context.run.split.release is not None and engine.num_steps >= context.run.train.steps:
            with contextlib.suppress(ReleaseRefusedError):
                lead.prepare_release()
        return engine.sealed_shards()

    saver = PlainSaver(shards, opening.savepoint, _settle_on_save(observe, recorder, engine))
    running = RunningSplit(engine, saver, lead, context, recorder)
    try:
        yield running
    except BaseException:
        running.tell_costs()
        raise


class RunningSplit:
    """A split at work."""

    def __init__(
        self,
        engine: SplitEngine,
        saver: PlainSaver,
        lead: SplitDriver | RemoteLead,
        context: SessionContext[SplitRun],
        recorder: RunRecorder,
    ) -> None:
        self.engine = self.trained_model = engine
        self.saver = saver
        self._lead = lead
        self._context = context
        self._recorder = recorder

    def return_to_checkpoint(self, reason: TrainingError) -> int:
        """An enclave opens its newest state only, so there is no older one to go back to."""
        raise reason

    def tell_costs(self) -> None:
        """Put the costs of the steps into the summary."""
        self._split_facts.update(self.engine.cost_facts())

    def record_end(self) -> None:
        """Record the digest of the weights, release adapters, and compare transcripts of both ends."""
        self.tell_costs()
        context, figures, lead = self._context, self._context.figures, self._lead
        self._release_adapters()
        figures.final_weights_digest = lead.request_weights_digest()
        statements = lead.compare_transcripts(enclave_of(context.home))
        if statements:
            text = {
                name: [statement.decode("ascii") for statement in signed_pair]
                for name, signed_pair in statements.items()
            }
            (context.home.path / "transcript.json").write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
        self._recorder.observe_event("run_completed", {"final_weights_digest": figures.final_weights_digest})

    def _release_adapters(self) -> None:
        """Have the adapters out where the policy lets them go; a refusal is an outcome, no failure."""
        summary = self._split_facts
        if self._context.run.split.release is None:
            summary["released"] = False
            return
        try:
            if not self._lead.prepare_release():
                self.saver.save_now(self.engine.num_steps, last=True)
            permitted, tensors = self._lead.request_release(self.engine.num_steps)
        except ReleaseRefusedError as exc:
            summary["released"] = False
            self._recorder.observe_event("release_refused", {"reason": exc.reason, "detail": exc.detail[:500]})
            return
        path = self._context.home.path / ADAPTERS
        path.touch(mode=0o600)
        save_file(tensors, path)
        summary["released"] = True
        self._recorder.observe_event("released", {**permitted, "weights_digest": weights_digest(tensors.items())})

    @property
    def _split_facts(self) -> dict[str, Any]:
        figures = self._context.figures
        if figures.split is None:
            figures.split = {}
        return figures.split


def _drawn_from(
    corpus: Corpus | PairCorpus | LabelledTexts, clients: Sequence[str]
) -> Sequences | Mapping[str, Sequences]:
    """Return what clients draw from: shares of one corpus, or each its own."""
    if isinstance(corpus, PairCorpus):
        return {name: corpus.share_of(number, len(clients)) for number, name in enumerate(clients)}
    return corpus.clients if isinstance(corpus, LabelledTexts) else corpus


def _remote_tokenizer(context: SessionContext[SplitRun], source: ModelSource) -> RunTokenizer | None:
    """Return the tokenizer that the run file names; None where it would be trained on text that clients have."""
    config = context.run.data.tokenizer
    if isinstance(config, BpeConfig):
        return None
    tokenizer = load_tokenizer(config, source.tokenizer_path)
    return RunTokenizer.from_text_tokenizer(config, source, tokenizer, context.home.cache_directory / "data")


def _prepare_task(context: SessionContext[SplitRun], source: ModelSource) -> LabelledTexts | None:
    """Prepare the task's texts, shared out; None where text is learned."""
    run, labelled = context.run, context.run.data.labelled
    if labelled is None:
        return None
    context.console.print(f"preparing {labelled.task_name}", markup=False)
    seed = run.train.seed
    texts = prepare_labelled(run.data, run.split.client_names, seed, source.tokenizer_path)
    check_vocabulary(texts.vocab_size, source.vocab_size)
    if texts.tokenizer.beginning_tokens:
        begin = f"labelled texts begin with {texts.tokenizer.beginning_tokens}, as the tokenizer's texts do"
        context.console.print(begin, markup=False)
    context.figures.texts = describe_texts(texts, labelled.task_name, seed)
    return texts


def _collect_refusals(context: SessionContext[SplitRun], recorder: RunRecorder, observe: Observe) -> RefusedClients:
    """Return what takes refusals of clients; where there is an admission, metrics and summary have them."""
    refused = RefusedClients(observe)
    if context.run.split.admission is not None and context.figures.split is not None:
        context.figures.split["admission"] = refused.facts
        recorder.figures = refused.figures
    return refused


def _attested_tier(split: SplitConfig) -> str | None:
    return None if split.mode == "plaintext" else split.tier


def _settle_on_save(note: Observe, recorder: RunRecorder, engine: SplitEngine) -> Observe:
    """What a checkpoint that is safe on the disk makes void is void for the enclave as well."""

    def observe(kind: str, body: dict[str, Any]) -> None:
        note(kind, body)
        if kind == "checkpoint_saved":
            # the log must know of it before older ones are void
            recorder.log.sync_events()
            engine.confirm_sealed()

    return observe


def _check_run(run: SplitRun, source: ModelSource) -> None:
    attends_in_documents(run, source)
    check_split(run.split, source, seq=run.data.sequence_length, objective=run.train.objective_kind)
