"""The rollback (L5): a run goes back to before a distrusted party's first unchecked step, and redoes all since."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from phalanx.engine import StepInputs, Verdict
from phalanx.errors import NoHolderError
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.owner.kept_states import KeptStates
from phalanx.pipeline.proof.step_record import StageChecks, step_checks
from phalanx.pipeline.protocol.messages import StateDigest
from phalanx.pipeline.protocol.needs import owner_task
from phalanx.pipeline.verify.facts import StepFacts, StepLedger
from phalanx.pipeline.worker.roles import BuildHeldStage
from phalanx.security.crypto import certified_name

PAST_BYTES = 2**28
"""Memory in which batches of more steps than have to be undone are remembered: 256 MiB."""


@dataclass(frozen=True)
class PastStep:
    """One applied step.

    Attributes:
        ledger: What every party had committed to.
        assignment: Holders and shadows at the time.
        checks: The parties on which each stage's work rests.
    """

    ledger: StepLedger
    assignment: Assignment
    inputs: StepInputs
    checks: Mapping[int, StageChecks] = field(default_factory=dict)

    @property
    def states_before(self) -> Mapping[int, StateDigest]:
        """Digest of each watched stage before the step."""
        return self.ledger.agreed


def drop_message_headers(step: PastStep) -> PastStep:
    """The step without the headers of its messages and the reports of its audits: what was committed to remains."""
    ledger = step.ledger
    bare = replace(
        ledger,
        commits={stage: said.model_copy(update={"received": (), "sent": ()}) for stage, said in ledger.commits.items()},
        commit_headers={},
        messages={},
        held={},
        reports={},
        awaited_audits=set(),
    )
    return replace(step, ledger=bare)


_STEP_BYTES = 2**14
"""Of what is remembered of a step beside its batch, at most as a rule."""


def _size_bytes(step: PastStep) -> int:
    inputs = step.inputs
    tensors = [*inputs.ids, *inputs.labels, *(rows for named in inputs.extras for rows in named.values())]
    return _STEP_BYTES + sum(tensor.nbytes for tensor in tensors)


class StepHistory:
    """The last applied steps, without a gap.

    Args:
        max_bytes: More of them where all together take no more memory than this.
    """

    def __init__(self, undoable_steps: int, max_bytes: int = 0) -> None:
        self._steps: deque[PastStep] = deque()
        self._undoable_steps = undoable_steps
        self._max_bytes = max_bytes
        self._size_bytes = 0

    def add_step(self, step: PastStep) -> None:
        """Remember the step that is about to be applied."""
        self._steps.append(step)
        self._size_bytes += _size_bytes(step)
        while len(self._steps) > self._undoable_steps and self._size_bytes > self._max_bytes:
            self._size_bytes -= _size_bytes(self._steps.popleft())

    def find_step(self, step: int) -> PastStep | None:
        """A step that is remembered."""
        return next((past for past in self._steps if past.ledger.step == step), None)

    def steps_since(self, step: int) -> Iterator[PastStep]:
        """The remembered steps from this one on, in order."""
        return iter([past for past in self._steps if past.ledger.step >= step])

    @property
    def oldest_step(self) -> int | None:
        """The first step that is remembered."""
        return self._steps[0].ledger.step if self._steps else None

    def forget_from(self, step: int) -> None:
        """Forget this step and later ones: they were undone."""
        while self._steps and self._steps[-1].ledger.step >= step:
            self._size_bytes -= _size_bytes(self._steps.pop())


class Rollback:
    """The rollback knows how far back each copy reaches, and remembers the batches to go there.

    Args:
        past_bytes: Memory for batches of more than the 2 `keep_states` steps that are always remembered.

    Attributes:
        undone_batches: Batches of steps that were undone and are to be done again, by step.
        kept_states: The states to go back to with `keep_states`.
        restored_step: The kept point at which all parties are about to begin; None where they begin with their
            present states.
    """

    def __init__(self, facts: StepFacts, kept: KeptStates, past_bytes: int = PAST_BYTES) -> None:
        self.undone_batches: dict[int, StepInputs] = {}
        self.kept_states = kept
        self.restored_step: int | None = None
        self._facts = facts
        self._doubtful_before: dict[str, int] = {}
        """Of a certificate, the step before which neither its word nor its work counts."""
        guard = facts.plan.guard
        self._keep_states = guard.keep_states
        self._step_history = StepHistory(
            max(int(guard.is_enabled), 2 * guard.keep_states), past_bytes if guard.keep_states else 0
        )
        self._since: dict[tuple[str, int], int] = {}

    def remember_step(self, step: PastStep) -> None:
        """Keep a step that is about to be applied."""
        if self._keep_states:
            # of hundreds of steps, their headers are let go of
            step = replace(drop_message_headers(step), checks=step_checks(self._facts))
        self._step_history.add_step(step)

    @owner_task
    async def keep_state(self, step: int) -> tuple[str, str] | None:
        """Keep the state before a step; see `KeptStates.keep_state`."""
        oldest = self._step_history.oldest_step
        return await self.kept_states.keep_state(step, step if oldest is None else oldest)

    def find_way_back(self, gone: str, verdict: Verdict | None, *, is_distrusted: bool = False) -> int | None:
        """Find the step that a run goes back to without a party; None where it goes on from where it is.

        Where the party is distrusted that is, with `keep_states`, the last kept point before its first step that no
        trusted party recomputed in full, in any life of its certificate. A step that lags counts as bad without it.

        Args:
            verdict: Its conviction; None where it was not convicted.
            is_distrusted: Whether it is replaced for its acts without one.
        """
        step, trusted = self._facts.ledger.step, verdict is None and not is_distrusted
        if verdict is None and not trusted:
            self._facts.observe("distrusted", {"party": gone, "step": step})
        if trusted or not self._keep_states:
            return self.unverified_step
        # a state is wrong because of the update before it, even where a party had recomputed that
        refuted = verdict.step - 1 if verdict is not None and verdict.offence == "state" else None
        self._doubtful_before[certified_name(gone)] = step
        points = [point for point in (self._kept_point(gone, refuted), self.unverified_step) if point is not None]
        return min(points, default=None)

    def _kept_point(self, gone: str, refuted: int | None) -> int | None:
        doubtful = next(
            (past for past in self._step_history.steps_since(0) if self._is_doubtful(past, gone, refuted)), None
        )
        oldest = self._step_history.oldest_step
        if doubtful is None or oldest is None:
            return None
        point = self.kept_states.point_before(doubtful.ledger.step, oldest)
        return point if point is not None and point < self._facts.ledger.step else None

    def _is_doubtful(self, past: PastStep, gone: str, refuted: int | None) -> bool:
        """Whether a step has work of a distrusted certificate for which no trusted party stands."""
        step = past.ledger.step

        def is_distrusted(party: str) -> bool:
            return step < self._doubtful_before.get(certified_name(party), 0)

        return any(
            checks.rests_on is None or any(map(is_distrusted, checks.rests_on)) or (step == refuted and party == gone)
            for checks in past.checks.values()
            if is_distrusted(party := checks.party)
        )

    @property
    def kept_library(self) -> BuildHeldStage | None:
        """Builds stages as they were at the kept point that all parties are about to begin at; else None."""
        return None if self.restored_step is None else self.kept_states.point_library(self.restored_step)

    @property
    def unverified_step(self) -> int | None:
        """The step that was applied before its audits were done; None when every applied step is verified."""
        lagging = self._facts.lagging_ledger
        return None if lagging is None else lagging.step

    def can_undo(self, step: int) -> bool:
        """Whether an applied step is remembered, so that it can be done again."""
        return self._step_history.find_step(step) is not None

    def undo_steps(self, first_bad: int, step: int) -> None:
        """Forget every step from the first bad one on; the batches are kept to do them again."""
        step_history, facts = self._step_history, self._facts
        self.undone_batches |= {past.ledger.step: past.inputs for past in step_history.steps_since(first_bad)}
        back, before = step_history.find_step(first_bad), step_history.find_step(first_bad - 1)
        facts.ledger.agreed = {} if back is None else dict(back.states_before)
        if first_bad != self.unverified_step and first_bad in self.kept_states:
            self.restored_step = first_bad
            facts.ledger.agreed |= self.kept_states.point_digests(first_bad)
        self.kept_states.forget_after(first_bad)
        facts.previous = None if before is None else before.ledger
        step_history.forget_from(first_bad)
        facts.observe("rolled_back", {"step": step, "to": first_bad})

    def without_young_copies(self, old: Assignment | None, step: int, reachable: Collection[str]) -> Assignment | None:
        """The old assignment without copies that cannot go back to `step`: their parties get the state like newcomers.

        Raises:
            NoHolderError: Of some stage only such copies are left.
        """
        if old is None or self.restored_step is not None:
            return None
        placed: tuple[dict[int, str], ...] = ({}, {}, {})
        for stage in old.holders:
            copies = old.parties_of(stage)
            able = [name for name in copies if self._since.get((name, stage), 0) <= step]
            if len(able) < len(copies) and not {*able} & {*reachable}:
                raise NoHolderError(
                    f"stage {stage}: no copy that is left goes back to step {step}; resume from the last checkpoint "
                    "with --resume"
                )
            for roles, name in zip(placed, able, strict=False):
                roles[stage] = name
        return Assignment(*placed)

    def note_copies(self, new: Assignment, step: int) -> None:
        """From which step on each party has had each stage: it can go back no further."""
        pairs = {(party, stage) for stage in new.holders for party in new.parties_of(stage)}
        known_since = {} if self.restored_step is not None else self._since
        self._since = {pair: known_since.get(pair, step) for pair in pairs}
