"""One segment of a published run, recomputed from the state before it and compared with the signed log step by step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from phalanx.checkpoint import Checkpoint
from phalanx.data import Batch, BatchLoader, Corpus
from phalanx.data.phases import DatasetConfig
from phalanx.errors import CheckpointError, ConfigError, NonFiniteLossError
from phalanx.models import ModelSource, StageSpec, made_one_by_one, open_model, shared_hub_config, stage_table
from phalanx.models import weights_digest as digest_weights
from phalanx.objectives import objective_of
from phalanx.pipeline import GuardConfig, StepPlan, class_of_session, read_leaves
from phalanx.pipeline.proof.step_record import AttemptLeaf, CommitLeaf, Leaf, StateLeaf
from phalanx.pipeline.protocol.tensor_stream import tensors_digest, transfer_digest
from phalanx.security.audit import LEAVES_FILE, LeafBatch, LogEntry, read_batch
from phalanx.train import PastRun
from phalanx.train.batches.rewriting import BatchRewriting, rewriting_of
from phalanx.train.config import PipelineRun
from phalanx.train.loop import step_inputs
from phalanx.train.records.history import CONFIG_CHANGED, FELL_BACK
from phalanx.train.records.lineage import open_run_corpus
from phalanx.train.records.samples import samples_digest
from phalanx.train.setup.honest_run import HonestRun
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.stage_source import StageLibrary

MAX_UNSEEN_BYTES = 2**30
"""A larger model is built only where published files fill it: a run file must not claim memory."""
_MAX_LAYERS = 1024

Verdict = Literal["proved", "refuted", "undecided"]


@dataclass(frozen=True)
class StepDifference:
    """The first fact that differs.

    Attributes:
        step: Step of the run, from 0, whose work differs.
        stage: Number of the stage; None for a fact about all stages.
        fact: Name of the digest or figure that was compared.
    """

    step: int
    stage: int | None
    fact: str
    published: str
    recomputed: str

    def describe_fact(self) -> str:
        """Describe it in one sentence."""
        place = f"step {self.step}" if self.stage is None else f"step {self.step}, stage {self.stage}"
        return f"{place}: {self.fact}: published {self.published:.80}, recomputed {self.recomputed:.80}"


@dataclass(frozen=True, order=True)
class RunSegment:
    """Steps from a state that can be opened up to the next one.

    Attributes:
        start: First step; the state before it is published, or drawn from the seed of the run where it is 0.
        end: One more than the last step.
    """

    start: int
    end: int

    @property
    def num_steps(self) -> int:
        """How many steps are recomputed."""
        return self.end - self.start


@dataclass(frozen=True)
class SegmentResult:
    """The outcome of one segment.

    Attributes:
        first_difference: The earliest one by step; None where everything was equal.
        compared: Facts of the signed log and of published states that were equal.
        why: Why nothing could be decided; empty otherwise.
    """

    segment: RunSegment
    verdict: Verdict
    first_difference: StepDifference | None = None
    compared: int = 0
    why: str = ""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "SegmentResult":
        """Read what `asdict` wrote."""
        difference = data["first_difference"]
        return cls(
            RunSegment(**data["segment"]),
            data["verdict"],
            None if difference is None else StepDifference(**difference),
            data["compared"],
            data["why"],
        )


@dataclass
class LoggedSteps:
    """What the signed log says of the steps that count: a step that was done again counts with its last line.

    Attributes:
        steps: Line and leaves of each step, and the number of its session.
        given_up: Number of batches of a step that failed before a batch was applied.
        sessions: Name and numeric class of each session, as its opening has them.
        first_step: First step that the published run file holds for.
        adopted: Whether the run began with the state of another.
    """

    steps: dict[int, tuple[dict[str, Any], LeafBatch, int]] = field(default_factory=dict)
    given_up: dict[int, int] = field(default_factory=dict)
    corpora: set[str] = field(default_factory=set)
    sessions: list[tuple[str, Mapping[str, Any] | None]] = field(default_factory=list)
    first_step: int = 0
    adopted: bool = False

    def read_entry(self, entry: LogEntry) -> None:
        """Follow one line."""
        kind, body = entry.kind, entry.body
        if kind in ("run_started", "run_resumed"):
            self.corpora |= {str(body["corpus"])} if "corpus" in body else set()
            self.sessions.append((str(body.get("session", "")), body.get("numeric_class")))
        elif kind == "step":
            self.steps[int(body["step"])] = (body, LeafBatch.from_log_entry(entry), len(self.sessions) - 1)
        elif kind == "batch_skipped":
            step, number = int(body["step"]), int(body["number"])
            # one line each: a stranger draws no more batches than the log has lines
            if not 1 <= number <= self.given_up.get(step, 0) + 1:
                raise ValueError(f"batch {number} of step {step} is given up before those before it")
            self.given_up[step] = max(number, self.given_up.get(step, 0))
        elif kind == CONFIG_CHANGED:
            self.first_step = int(body["step"])
        self.adopted = self.adopted or kind == "adopted"
        undone = {"rolled_back": "to", FELL_BACK: "to_step", "older_accepted": "step"}.get(kind)
        if undone is not None:
            to = int(body[undone])
            self.steps = {step: value for step, value in self.steps.items() if step < to}
            if kind != "rolled_back":
                # what is given up when these steps are done again is told again
                self.given_up = {step: number for step, number in self.given_up.items() if step < to}


@dataclass(frozen=True)
class Laboratory:
    """Everything that segments are recomputed with, opened once.

    Attributes:
        states: Steps of the published states.
        num_steps: Steps that the run has done.
        run: Its config, with the places where files are here.
        measure_class: Returns the digests of this machine's kernels for a session; see `class_of_session`.
    """

    past: PastRun
    facts: LoggedSteps
    states: tuple[int, ...]
    num_steps: int
    run: PipelineRun
    source: ModelSource
    plan: StepPlan
    corpus: Corpus
    rewrite: BatchRewriting | None
    measure_class: Callable[[str], Mapping[str, Any] | None]

    def read_step(self, step: int) -> list[Leaf]:
        """Return the leaves of a step; none where the log has no record of it."""
        if step not in self.facts.steps:
            return []
        return read_leaves(read_batch(self.past.path / LEAVES_FILE, self.facts.steps[step][1]))

    def open_state(self, step: int) -> Checkpoint | None:
        """Return the published state before a step; None where there is none."""
        return self.past.open_verified(step) if step in self.states else None

    def find_other_class(self, segment: RunSegment) -> str | None:
        """Say why other bits than the published ones would decide nothing here; None where they refute."""
        if self.plan.numerics != "float":
            return None
        numbers = {self.facts.steps[step][2] for step in range(segment.start, segment.end) if step in self.facts.steps}
        for number in numbers or {len(self.facts.sessions) - 1}:
            name, published = self.facts.sessions[number]
            here = self.measure_class(name)
            if published is None or here is None:
                return "the log does not say which numeric class the run was of, so other bits prove nothing"
            if here["kernels"] != published.get("kernels"):
                return (
                    f"this machine is of another numeric class ({here['described']}) than the run "
                    f"({published.get('described')!s:.300}), so other bits prove nothing"
                )
        return None

    @property
    def first_ordered(self) -> int | None:
        """The step from which on the order of the data is drawn; of a changed run file that of a published state."""
        begun = self.facts.first_step
        return min((step for step in self.states if step >= begun), default=None) if begun else 0

    def check_order(self) -> StepDifference | None:
        """Draw the order of the data again for every step; return the first step that the log says otherwise of."""
        facts, run, begin = self.facts, self.run, self.first_ordered
        if facts.corpora != {self.corpus.digest}:
            published = next(iter(sorted(facts.corpora - {self.corpus.digest})), "none")
            return StepDifference(0, None, "digest of the data", published, self.corpus.digest)
        if begin is None:
            return None
        loader = BatchLoader(self.corpus, run.train.draws_per_step, run.train.seed)
        state = self.open_state(begin)
        if begin and state is not None:
            try:
                loader.load_position(state.state["loader"])
            except (CheckpointError, KeyError, TypeError) as exc:
                return StepDifference(begin, None, "place in the data", str(exc), "one of the run file's order")
        for step in range(begin, self.num_steps + 1):
            state = self.open_state(step)
            if state is not None and loader.position_state() != state.state.get("loader"):
                published, drawn = (str(place) for place in (state.state.get("loader"), loader.position_state()))
                return StepDifference(step, None, "place in the data", published, drawn)
            for _ in range(facts.given_up.get(step, 0)):
                loader.next_sequences()
            drawn = samples_digest(loader.next_sequences())
            # a line without it would leave the order to its owner
            published = str(facts.steps[step][0].get("samples")) if step in facts.steps else "none"
            if step < self.num_steps and published != drawn:
                return StepDifference(step, None, "order of the data", published, drawn)
        return None

    def read_batches(self, start: int) -> Iterator[Batch]:
        """Yield the batch of each step from one on; batches that were given up are passed."""
        loader = BatchLoader(self.corpus, self.run.train.draws_per_step, self.run.train.seed, rewrite=self.rewrite)
        state, step = self.open_state(start), start
        if state is not None:
            loader.load_position(state.state["loader"])
        while True:
            for _ in range(self.facts.given_up.get(step, 0)):
                loader.next_sequences()
            yield loader.next_batch()
            step += 1


@dataclass(frozen=True)
class LocalPlaces:
    """Where the files of a run are on this machine; no place that the run file names is read.

    Attributes:
        data: Directory of the data set.
        model: Directory of the files that the model began with; None where its seed draws it.
        cache: Directory of prepared models and tokens.
        is_brought: Whether the data is the stranger's copy, so that another one accuses nobody.
        base: Digest that the model's files must have; None where there are none.
        size_bytes: Bytes of all published states.
    """

    data: Path
    model: Path | None
    cache: Path
    is_brought: bool
    base: str | None
    size_bytes: int


def open_laboratory(
    past: PastRun, run: PipelineRun, facts: LoggedSteps, states: tuple[int, ...], places: LocalPlaces
) -> Laboratory:
    """Open model, plan and data of a published run.

    Raises:
        ConfigError: They are others than the manifest says, or the run file claims more memory than states fill.
        ModelError, DataError: They are missing or damaged.
    """
    if places.model is not None:
        run = run.model_copy(update={"model": run.model.model_copy(update={"path": str(places.model)})})
    _check_size(run, places.size_bytes)
    source = open_model(run.model, places.cache / "models", run.train.seed)
    if places.base is not None and source.files_digest() != places.base:
        raise ConfigError(f"{source.directory}: is another model than the run began with")
    dataset = (run.data.dataset or DatasetConfig(path=places.data)).model_copy(update={"path": places.data})
    corpus = open_run_corpus(run, places.cache, places.data, dataset)
    if places.is_brought and facts.corpora - {corpus.digest}:
        raise ConfigError(f"{places.data}: is another data set than the log names")
    plan = make_plan(run, source)
    measured: dict[str, Mapping[str, Any] | None] = {}

    def measure_class(session: str) -> Mapping[str, Any] | None:
        if session not in measured:
            measured[session] = class_of_session(plan, session)
        return measured[session]

    return Laboratory(
        past=past,
        facts=facts,
        states=states,
        num_steps=max([step + 1 for step in facts.steps] + list(states), default=0),
        run=run,
        source=source,
        # nothing is undone here: no copy of the state before a step is needed
        plan=plan.model_copy(update={"guard": GuardConfig(mode="off", classes=plan.guard.classes)}),
        corpus=corpus,
        rewrite=rewriting_of(run, corpus),
        measure_class=measure_class,
    )


def recompute_segment(lab: Laboratory, segment: RunSegment, tell: Callable[[int], None]) -> SegmentResult:
    """Recompute one segment.

    Args:
        tell: Told after each step how many are done.
    """
    walk = _SegmentWalk(lab, segment)
    try:
        difference = walk.take_steps(tell)
    except (CheckpointError, NonFiniteLossError) as exc:
        difference = StepDifference(walk.step, None, "its work", "was done", str(exc))
    if difference is None and not walk.has_end:
        silent = f"neither the log nor a published state shows what step {segment.end - 1} led to"
        return SegmentResult(segment, "undecided", compared=walk.compared, why=silent)
    if difference is None:
        return SegmentResult(segment, "proved", compared=walk.compared)
    why = "parties of several numeric classes computed it" if walk.is_mixed else lab.find_other_class(segment)
    if why is None:
        return SegmentResult(segment, "refuted", difference, walk.compared)
    return SegmentResult(segment, "undecided", difference, walk.compared, why)


class _SegmentWalk:
    """One segment, step by step.

    Attributes:
        step: Number of the step under way, from 0.
        compared: Facts that were equal so far.
        is_mixed: Whether parties of several numeric classes computed a step so far.
    """

    def __init__(self, lab: Laboratory, segment: RunSegment) -> None:
        self._lab, self._segment = lab, segment
        self.step, self.compared, self.is_mixed = segment.start, 0, False
        self._stages, self._shown = 0, set[int]()

    @property
    def has_end(self) -> bool:
        """Whether the log or a published state shows the state of every stage after the last step."""
        return len(self._shown) == self._stages

    def take_steps(self, tell: Callable[[int], None]) -> StepDifference | None:
        """Recompute all steps; return the first difference."""
        lab, segment = self._lab, self._segment
        objective = objective_of(lab.run.train.objective)
        honest = HonestRun(lab.plan, StageLibrary(lab.source, lab.plan, lab.open_state(segment.start)), objective)
        self._stages = len(honest.copies)
        difference = self._compare_states(honest, lab.read_step(segment.start), "before it")
        batches = lab.read_batches(segment.start)
        for self.step in range(segment.start, segment.end):
            if difference is not None:
                return difference
            inputs = step_inputs(next(batches), lab.plan.microbatches, objective)
            honest.compute_step(self.step, inputs)
            self._shown.clear()
            difference = self._finish_step(honest)
            tell(self.step + 1 - segment.start)
        return difference or self._compare_end(honest)

    def _finish_step(self, honest: HonestRun) -> StepDifference | None:
        """Compare gradients with commitments, update, and compare the states after it."""
        gradients, leaves = honest.take_gradients(), self._lab.read_step(self.step)
        norms = honest.squared_norms(gradients)
        clip = honest.clip_of_norms(norms)
        for leaf in leaves:
            facts: dict[str, tuple[str, str]] = {}
            stage = None
            if isinstance(leaf, AttemptLeaf):
                self.is_mixed = self.is_mixed or bool(leaf.classes)
                facts["clip coefficient"] = (repr(leaf.clip), repr(clip))
            elif isinstance(leaf, CommitLeaf):
                stage = leaf.stage
                if stage >= len(norms):
                    return StepDifference(self.step, stage, "the stage", "is there", "is none of the run file's")
                facts["norm of the weight gradient"] = (repr(leaf.norm_squared), repr(norms[stage]))
                if leaf.gradient:
                    facts["weight gradient"] = (leaf.gradient, transfer_digest(gradients[stage]))
            difference = self._compare_facts(stage, facts)
            if difference is not None:
                return difference
            self._shown |= set() if stage is None else {stage}
        honest.apply_gradients(self.step, gradients, clip)
        return self._compare_states(honest, self._lab.read_step(self.step + 1), "after it")

    def _compare_states(self, honest: HonestRun, leaves: Sequence[Leaf], when: str) -> StepDifference | None:
        """Compare the present states with the digests that parties agreed on at the beginning of a step."""
        for leaf in leaves:
            if isinstance(leaf, StateLeaf) and leaf.stage < len(honest.copies):
                state = honest.copies[leaf.stage].compute_digest()
                facts = {
                    f"weights {when}": (leaf.weights, state.weights),
                    f"moments {when}": (leaf.moments, state.moments),
                }
                difference = self._compare_facts(leaf.stage, facts)
                if difference is not None:
                    return difference
                self._shown.add(leaf.stage)
        return None

    def _compare_end(self, honest: HonestRun) -> StepDifference | None:
        """Compare the last state with the published one, and with the weights that the log ends with."""
        end_step = self._segment.end
        state = self._lab.open_state(end_step)
        for copy in [] if state is None else honest.copies:
            published = "" if state is None else tensors_digest(state.stage_tensors(copy.spec.index))
            facts = {f"state of step {end_step}": (published, tensors_digest(copy.optimizer.state_tensors()))}
            difference = self._compare_facts(copy.spec.index, facts)
            if difference is not None:
                return difference
            self._shown.add(copy.spec.index)
        final = self._lab.past.final_weights_digest
        if final is None or end_step != self._lab.num_steps:
            return None
        named = (
            (name, tensor.detach()) for copy in honest.copies for name, tensor in copy.module.all_parameters().items()
        )
        self._shown |= {copy.spec.index for copy in honest.copies}
        return self._compare_facts(None, {"final weights": (final, digest_weights(named))})

    def _compare_facts(self, stage: int | None, facts: Mapping[str, tuple[str, str]]) -> StepDifference | None:
        for fact, (published, recomputed) in facts.items():
            if published != recomputed:
                return StepDifference(self.step, stage, fact, published, recomputed)
            self.compared += 1
        return None


def _check_size(run: PipelineRun, shown_bytes: int) -> None:
    """Return when the run file claims no more memory than published states fill, or little; nothing is built."""
    architecture = run.model.architecture
    if architecture is None:
        return
    if made_one_by_one(architecture) > _MAX_LAYERS:
        raise ConfigError(f"the run file claims more than {_MAX_LAYERS} layers")
    config = shared_hub_config(architecture)
    (row,) = stage_table(config, (StageSpec(0, 1, 0, int(config.num_hidden_layers)),), None)
    if row.kept > max(MAX_UNSEEN_BYTES, shown_bytes) // 4:
        raise ConfigError(f"the run file claims {row.kept} weights, which no published state fills")
