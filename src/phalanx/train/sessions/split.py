"""A run with clients and an enclave: the same loop, records and checkpoints, with an enclave in the place of stages."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from safetensors.torch import save_file

from phalanx.checkpoint import CertifiedCheckpoints
from phalanx.config import digest, dump_toml
from phalanx.data import Corpus
from phalanx.errors import ReleaseRefusedError
from phalanx.models import ModelSource, open_model, stage_table
from phalanx.pipeline import OWNER, Observe
from phalanx.security.audit import AuditLog
from phalanx.split import SplitDriver, cut_model
from phalanx.split.check import check_split
from phalanx.split.hardware.tier import worth
from phalanx.telemetry import MetricsFile, ProgressDisplay, TensorBoardWriter
from phalanx.train.batches.client_loader import ClientLoader
from phalanx.train.batches.labelled import LabelledTexts, prepare_labelled
from phalanx.train.batches.scores import describe_texts
from phalanx.train.config import RunConfig
from phalanx.train.engines.split_engine import SplitEngine
from phalanx.train.records.history import RunHistory
from phalanx.train.records.record import RunRecorder
from phalanx.train.saving.savepoint import Savepoint
from phalanx.train.saving.saver import PlainSaver
from phalanx.train.sessions.hooks import RunHooks
from phalanx.train.sessions.session import Session, check_vocabulary
from phalanx.train.sessions.split_cluster import enclave_of, split_company, split_of

ADAPTERS = "adapters.safetensors"


def describe_split(run: RunConfig, source: ModelSource) -> RenderableType:
    """The resolved config, the two parts and what stands behind the enclave, for the terminal.

    Raises:
        ConfigError: The split cannot work.
    """
    _check(run, source)
    split = split_of(run)
    table = Table(title=f"{split.mode} split, {split.clients} clients; {worth(split)}")
    for name in ("part", "layers", "parameters", "trained", "bytes a step"):
        table.add_column(name, justify="right")
    specs = cut_model(source.num_layers, split.cut)
    item_bytes = 4 if split.wire == "fp32" else 2
    crossing = run.train.batch_size * run.data.sequence_length * (source.hidden_size * item_bytes + 8)
    rows = stage_table(source.hub_config, specs, run.model.adapter)
    for name, row, trained, size in (("client", rows[0], 0, f"{crossing:,} out"), ("enclave", rows[1], None, "")):
        layers = f"{row.first_layer}-{row.end_layer - 1}"
        count = row.trainable if trained is None else trained
        table.add_row(name, layers, f"{row.parameters:,}", f"{count:,}", size)
    return Group(Syntax(dump_toml(run), "toml", background_color="default"), table)


class SplitSession(Session):
    """Clients and owner of a split: what `train` does with a section ``[split]``."""

    def _run(self, log: AuditLog, history: RunHistory) -> None:
        run, home, split = self.config, self.home, split_of(self.config)
        source = open_model(run.model, home.cache / "models", run.train.seed)
        _check(run, source)
        self.console.print(worth(split), style="bold", markup=False, highlight=False)
        facts: dict[str, Any] = {"mode": split.mode, "tier": self._tier(), "worth": worth(split)}
        self.figures.split = facts
        labelled = self._labelled(source)
        corpus = labelled or self._corpus(source)
        sizes = (run.train.batch_size, run.train.microbatches, run.train.seed)
        drawn_from = corpus if isinstance(corpus, Corpus) else corpus.clients
        loader = ClientLoader(drawn_from, split.client_names, *sizes)
        num_classes = 0 if labelled is None else len(labelled.classes)
        savepoint = Savepoint(
            run, home, loader, self.figures, self.totals, source=source, certified=history.certified, log=log
        )
        checkpoint = savepoint.open() if history.head is not None else None
        metrics = MetricsFile(home.path / "metrics.jsonl")
        start = savepoint.rewind(checkpoint, metrics)
        if history.head is not None:
            self.figures.resumed_from = start
        self.figures.wall_s = self.totals.wall_s
        with contextlib.ExitStack() as stack:
            stack.enter_context(metrics)
            board = stack.enter_context(TensorBoardWriter(home.path / "tensorboard"))
            progress = stack.enter_context(ProgressDisplay(run.train.steps, start, console=self.console))
            recorder = RunRecorder(metrics, log, board, progress, self.truth, self.totals)
            recorder.observe("run_started" if history.head is None else "run_resumed", self._split_opening(start))
            lead = stack.enter_context(split_company(run, home, source, num_classes))
            self._tell_appraisals(lead, recorder)
            engine = SplitEngine(lead, num_classes)
            if checkpoint is not None:
                engine.load(checkpoint)
            saver = PlainSaver(engine.shards, savepoint, self._settling(recorder, history.certified, engine.kept))
            hooks = RunHooks(run, engine, corpus, recorder, saver, self.figures)
            try:
                self._train(engine, loader, hooks, start)
            finally:
                facts |= engine.facts()
            self._finish_split(lead, recorder)

    def _labelled(self, source: ModelSource) -> LabelledTexts | None:
        """The task's texts, shared out; None where text is learned."""
        run, wanted = self.config, self.config.data.labelled
        if wanted is None:
            return None
        self.console.print(f"preparing {wanted.task}", markup=False)
        seed = run.train.seed
        texts = prepare_labelled(run.data, split_of(run).client_names, seed, source.tokenizer_path)
        check_vocabulary(texts.vocab_size, source)
        self.figures.texts = describe_texts(texts, wanted.task, seed)
        return texts

    def _tier(self) -> str | None:
        split = split_of(self.config)
        return None if split.mode == "plaintext" else split.tier

    def _split_opening(self, start: int) -> dict[str, Any]:
        split = split_of(self.config)
        return {
            "config_digest": digest(self.config),
            "step": start,
            "mode": split.mode,
            "tier": self._tier(),
            "clients": list(split.client_names),
            "owner": OWNER,
            "owner_key": self.home.owner.public.public_key.hex(),
        }

    def _tell_appraisals(self, lead: SplitDriver, recorder: RunRecorder) -> None:
        for party in lead.parties:
            if party.appraisal is not None:
                recorder.observe("enclave_appraised", {"party": party.name, "result": party.appraisal.to_json()})

    def _settling(self, recorder: RunRecorder, certified: CertifiedCheckpoints, settle: Callable[[], None]) -> Observe:
        """What a checkpoint that is safe on the disk makes void is void for the enclave as well."""

        def observe(kind: str, body: dict[str, Any]) -> None:
            self.figures.observe(kind, body)
            certified.take(kind, body)
            recorder.observe(kind, body)
            if kind == "checkpoint_saved":
                # the log must know of it before older ones are void
                recorder.log.sync()
                settle()

        return observe

    def _finish_split(self, lead: SplitDriver, recorder: RunRecorder) -> None:
        figures = self.figures
        figures.final_weights_digest = lead.weigh()
        self._release(lead, recorder)
        statements = lead.compare_transcripts(enclave_of(self.home))
        if statements:
            text = {name: [one.decode("ascii") for one in both] for name, both in statements.items()}
            (self.home.path / "transcript.json").write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
        recorder.observe("run_completed", {"final_weights_digest": figures.final_weights_digest})

    def _release(self, lead: SplitDriver, recorder: RunRecorder) -> None:
        """Have the adapters out where the policy lets them go; a refusal is an outcome, no failure."""
        summary = self.figures.split or {}
        if split_of(self.config).release is None:
            summary["released"] = False
            return
        try:
            permitted, tensors = lead.release(self.config.train.steps)
        except ReleaseRefusedError as exc:
            summary["released"] = False
            recorder.observe("release_refused", {"reason": exc.reason, "detail": exc.detail[:500]})
            return
        path = self.home.path / ADAPTERS
        path.touch(mode=0o600)
        save_file(tensors, path)
        summary["released"] = True
        recorder.observe("released", dict(permitted))


def _check(run: RunConfig, source: ModelSource) -> None:
    check_split(split_of(run), source, seq=run.data.sequence_length, objective=run.train.objective)
