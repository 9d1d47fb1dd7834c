"""One session of a run: its log, decisions of earlier sessions, its figures, and the state of the disk."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich.console import Console

from phalanx.checkpoint import Checkpoint, Shard
from phalanx.config import digest_config, printable_text
from phalanx.data import Corpus, prepare_corpus, prepare_validation_sets, unigram_perplexity
from phalanx.data.loader import HeldOut
from phalanx.data.preferences import PairCorpus
from phalanx.data.validation_sets import tokenizer_of_corpus
from phalanx.errors import CheckpointError, ConfigError, PolicyError
from phalanx.models import ModelSource
from phalanx.models.layout import check_vocabulary
from phalanx.pipeline import OWNER, Observe
from phalanx.security.audit import AuditLog
from phalanx.security.privacy import BudgetLedger
from phalanx.telemetry import row_bar
from phalanx.train.batches.mixed import LearnedPart
from phalanx.train.batches.preferences import PreferenceMeasure, prepare_pairs
from phalanx.train.batches.reference import REFERENCE_FILE, ReferenceStore
from phalanx.train.config import DomainRun, PipelineRun, RunConfig
from phalanx.train.loop import Loader
from phalanx.train.records.audit_trail import retire_key
from phalanx.train.records.history import CONFIG_CHANGED, FELL_BACK, RunHistory
from phalanx.train.records.record import RunningTotals, RunRecorder
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.records.summary import Figures
from phalanx.train.records.trust import describe_ranges
from phalanx.train.saving.savepoint import Savepoint
from phalanx.train.sessions.continue_from import adopted_state
from phalanx.train.setup.layout import check_head

RunT_co = TypeVar("RunT_co", bound=RunConfig, covariant=True)


@dataclass(frozen=True)
class StartingPoint:
    """The point at which a session begins, if not at its run's newest checkpoint.

    Attributes:
        from_step: The step of an older checkpoint of this run; None for its newest one.
        origin: Another run's checkpoint, for a new run that goes on there.
    """

    from_step: int | None = None
    origin: Checkpoint | None = None


@dataclass(frozen=True)
class SessionContext(Generic[RunT_co]):
    """The context of a session, on which every engine's part works."""

    run: RunT_co
    home: RunDirectory
    console: Console
    log: AuditLog
    history: RunHistory
    beginning: StartingPoint
    resume: bool
    figures: Figures
    totals: RunningTotals

    @property
    def asks_workers(self) -> bool:
        """Whether workers may know lines that the log lacks: until they have spoken, nothing is written."""
        return self.resume and bool(self.run.remote_workers)

    @property
    def has_earlier_state(self) -> bool:
        """Whether there is a state that the session goes on from."""
        return self.history.head is not None or self.beginning.origin is not None

    def remove_outdated_files(self) -> None:
        """Remove what speaks of an older log: its summary, and a key that it tells."""
        self.home.remove_summary()
        retire_key(self.home, self.history)

    def print_line(self, line: str) -> None:
        """Show one line on the terminal, whatever another party chose in it; from any thread."""
        self.console.print(printable_text(line), markup=False, highlight=False, soft_wrap=True)

    def log_event(self, kind: str, body: dict[str, Any]) -> None:
        """Write an event before there is a recorder."""
        self.log.append_event(kind, body)
        self.history.certified.follow_event(kind, body)

    def keep_changes(self, step: int) -> None:
        """Log and print this session's changes of the run file, then make it the run directory's.

        The log comes first: a crash in between leaves a directory that says less than the log, never more.
        """
        changes = self.home.changes
        if changes is None:
            return
        rates = changes.rates_at(self.run, step)
        body = {
            "from": digest_config(changes.before),
            "to": digest_config(self.run),
            "keys": {key: list(pair) for key, pair in changes.keys.items()},
            "step": step,
            **({} if rates is None else {"learning_rate": list(rates)}),
        }
        self.log_event(CONFIG_CHANGED, body)
        self.log.sync_events()
        self.home.keep_changes()
        self.print_line(changes.describe_changes(self.run, step))
        if self.run.remote_workers:
            self.print_line(f"a worker that pins run_digest needs the new one: {digest_config(self.run)}")

    def prepare_corpus(self, source: ModelSource) -> Corpus | PairCorpus:
        """Prepare the text, or the pairs, of the run."""
        check_head(self.run, source)
        if self.run.data.preferences is None:
            return self.prepare_text(source)
        return self._prepare_pairs(source, self.run, REFERENCE_FILE)

    def prepare_text(self, source: ModelSource) -> Corpus:
        """Prepare the text of the run."""
        run = self.run
        self.console.print("preparing text")
        corpus = prepare_corpus(
            run.data, self.home.cache_directory / "data", run.train.seed, source.tokenizer_path, self._print_phase
        )
        for remark in corpus.user_notes:
            self.print_line(f"data: {remark}")
        check_vocabulary(corpus.vocab_size, source.vocab_size)
        if corpus.num_validation_sequences or not run.data.validation:
            self.figures.unigram_perplexity = unigram_perplexity(corpus)
        return corpus

    def _prepare_pairs(self, source: ModelSource, run: RunConfig, file: str) -> PairCorpus:
        self.console.print("preparing pairs")
        with row_bar("reference", self.console) as show_progress:
            store = ReferenceStore(self.home.path / file, self.history.opened, show_progress)
            pairs = prepare_pairs(run, self.home.cache_directory / "data", source, store, self.print_line)
        check_vocabulary(pairs.vocab_size, source.vocab_size)
        num_held_out = pairs.num_validation_sequences
        self.print_line(f"data: {pairs.num_train_sequences} pairs to train on, {num_held_out} held out")
        return pairs

    def prepare_further(self, source: ModelSource, corpus: Corpus) -> tuple[LearnedPart, ...]:
        """Prepare the data of each of ``[[objectives]]``, with the tokenizer of the run's own text."""
        run = self.run
        if not isinstance(run, PipelineRun | DomainRun):
            return ()
        tokenizer = tokenizer_of_corpus(run.data.tokenizer, corpus)
        parts = []
        for further in run.objectives:
            self.print_line(f'objectives: preparing "{further.name}"')
            alone = run.run_of(further, tokenizer)
            if alone.data.preferences is not None:
                pairs = self._prepare_pairs(source, alone, f"reference-{further.name}.safetensors")
                parts.append(LearnedPart(further.name, pairs, PreferenceMeasure(alone, source)))
                continue
            directory = self.home.cache_directory / "data"
            text = prepare_corpus(alone.data, directory, run.train.seed, source.tokenizer_path, self._print_phase)
            for remark in text.user_notes:
                self.print_line(f"data: {remark}")
            check_vocabulary(text.vocab_size, source.vocab_size)
            parts.append(LearnedPart(further.name, text))
        return tuple(parts)

    def validation_sets(self, source: ModelSource, corpus: Corpus | PairCorpus) -> Mapping[str, HeldOut]:
        """Prepare the further validation sets of the run."""
        if isinstance(corpus, PairCorpus):
            return {}
        directory = self.home.cache_directory / "data"
        sets = prepare_validation_sets(self.run.data, corpus, directory, source.tokenizer_path, self._print_phase)
        for name, validation_set in sets.items():
            if validation_set.user_note:
                self.print_line(f'data.validation "{name}": {validation_set.user_note}')
        return sets

    def adopt_checkpoint(self, savepoint: Savepoint, cut: Callable[[Checkpoint], Iterable[Shard]]) -> None:
        """Write the first checkpoint of a run that goes on where another one is.

        Args:
            cut: Yields the other run's tensors as this run has its stages.
        """
        origin = self.beginning.origin
        if origin is None:
            if self.history.adopted and self.history.certified.newest_step is None:
                raise CheckpointError(f"{self.home.path}: --from was interrupted; start again in another directory")
            return
        state = adopted_state(origin, self.run, self.home.run_id)
        # first the log: a crash from here on must not pass for a run that begins from nothing
        self.log.append_event("adopted", state["origin"])
        self.log.sync_events()
        saved = savepoint.write_checkpoint(origin.step, cut(origin), state)
        self.log_event("checkpoint_saved", saved.event_body())

    def accept_older(self, savepoint: Savepoint) -> None:
        """Go back to an older checkpoint, because the user said so."""
        step = self.beginning.from_step
        if step is None:
            return
        savepoint.accept_older(step)
        self.log_event("older_accepted", {"step": step})

    def report_lost_steps(self, reached: int, start: int) -> None:
        """Say from which step to which a resumed run goes back, and count the steps that are lost by it.

        A step whose states were not verified yet when a run with a journal stopped is none of them; nor are those that
        the user gives up with ``--from-step``.

        Args:
            reached: The step after the last one that has metrics.
        """
        earlier = [body["steps_lost"] for kind, body in self.history.decisions if kind == FELL_BACK]
        self.figures.steps_lost = max(self.figures.steps_lost, sum(earlier))
        if reached <= start or not self.has_earlier_state:
            return
        done = describe_ranges([(start, reached - 1)])
        if self.beginning.from_step is not None:
            self.print_line(f"returns from step {reached} to step {start}, by --from-step: {done} will be repeated")
        elif (
            isinstance(self.run, PipelineRun) and self.run.journals and reached - start <= 1 + self.run.guard.commit_lag
        ):
            self.print_line(
                f"returns from step {reached} to step {start}: {done} had no verified state yet and will be repeated"
            )
        else:
            reason = "the run stopped at its last state"
            body = {"from_step": reached, "to_step": start, "steps_lost": reached - start, "reason": reason}
            self.log_event(FELL_BACK, body)
            self.figures.observe(FELL_BACK, body)
            self.print_line(
                f"returns from step {reached} to step {start}, its last state: {done} of the last session are lost "
                f"and will be repeated; {self._advise_saving()}"
            )

    def _advise_saving(self) -> str:
        """What to set, so that less is lost the next time."""
        can_journal = self.run.checkpoint.journal is False and self.run.can_journal
        return (
            "checkpoint.journal = true loses no steps"
            if can_journal
            else "a smaller checkpoint.every loses fewer steps"
        )

    def log_opening(self, recorder: RunRecorder, start: int, loader: Loader, facts: dict[str, Any]) -> None:
        """Write the first event of the session, with what its engine adds."""
        own_code, corpus = self.run.own_code, loader.corpus_digest
        shared = {
            "config_digest": digest_config(self.run),
            **({"own_code": own_code} if own_code else {}),
            **self._policy_facts(),
            "step": start,
            "owner": OWNER,
            "owner_key": self.home.owner.public.public_key.hex(),
            **({} if corpus is None else {"corpus": corpus}),
        }
        recorder.observe_event("run_started" if self.history.head is None else "run_resumed", {**shared, **facts})

    def _policy_facts(self) -> dict[str, str]:
        """Return the digest of the policy, which is the same in all sessions of a run."""
        if self.run.policy is None:
            return {}
        digest = self.run.policy.read_policy().policy.digest
        if self.history.policies - {digest}:
            raise PolicyError(f"{self.home.path}: was begun under another policy than {self.run.policy.file} is now")
        return {"policy": digest}

    def use_budget(self, ledger: BudgetLedger) -> None:
        """Spend from a privacy budget from now on, and print the rest of it."""
        self.check_begins_anew()
        self.figures.budget = ledger
        self.print_line(
            f"privacy: noise multiplier {ledger.step.noise_multiplier:.3f}, {ledger.affordable} steps within "
            f"epsilon {ledger.epsilon:g} at delta {ledger.delta:g}; {ledger.num_charges} charged"
        )
        if "against" in ledger.terms:
            self.print_line(f"privacy: the bound holds against {ledger.terms['against']}")

    def check_begins_anew(self) -> None:
        """Return where the weights that a private run begins with are of no run before it."""
        if self.beginning.origin is not None or self.history.adopted:
            raise ConfigError(
                "[privacy]: --from starts from weights of another run, which the bound of this run does not cover; "
                "use model.path if they were trained on other text"
            )

    def make_observer(self, recorder: RunRecorder) -> Observe:
        """Return what counts an event, believes it of checkpoints, and records it."""

        def observe(kind: str, body: dict[str, Any]) -> None:
            self.figures.observe(kind, body)
            self.history.certified.follow_event(kind, body)
            recorder.observe_event(kind, body)

        return observe

    def _print_phase(self, phase: str, documents: int) -> None:
        if documents:
            unit = "files" if phase.startswith("skipped") else "documents"
            self.console.print(f"  {phase}: {documents} {unit}", style="dim", markup=False)
