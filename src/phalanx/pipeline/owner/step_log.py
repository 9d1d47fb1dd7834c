"""The record of each step: verified states, what proves the step, bytes, and copies of all stages for checkpoints."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from phalanx.errors import VerificationError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.membership.members import NoteVerified
from phalanx.pipeline.proof.step_record import StepRecords
from phalanx.pipeline.protocol.messages import FetchBulk, StateDigest
from phalanx.pipeline.protocol.requests import PendingRequest, Requests
from phalanx.pipeline.stage.stage_copy import frozen_part, state_digest, trained_shapes
from phalanx.pipeline.verify.facts import StepFacts
from phalanx.pipeline.worker.party import Party
from phalanx.pipeline.worker.roles import Roles
from phalanx.transport import Endpoint


@dataclass(frozen=True, eq=False)
class StageState:
    """One stage's trained tensors, and what holder and shadow have both signed about them.

    Attributes:
        tensors: ``weight/...`` and the optimizer's moments; frozen weights are not in it.
        agreed: State that both signed; None for the owner's own stages, and without a guard.
    """

    stage: int
    party: str
    tensors: dict[str, Tensor]
    num_steps: int
    agreed: StateDigest | None

    def check_digest(self) -> None:
        """Compare the bytes with the agreed digest; takes as long as reading them, in any thread."""
        if self.agreed is None:
            return
        if state_digest(self.tensors, frozen_part(self.agreed), self.num_steps) != self.agreed:
            raise VerificationError(
                f"stage {self.stage}: {self.party} sent a state that differs from its signature; not used"
            )


@dataclass(eq=False)
class Duplicate:
    """One duplicate under way; made by `Duplicates.begin_duplicate`.

    Attributes:
        num_steps: Finished steps of the run when it was taken.
        failure: Why it will never be whole; None while all is well.
        agreed: States of this step that holders and shadows have signed; None until all of them have.
    """

    num_steps: int
    failure: str | None = None
    agreed: Mapping[int, StateDigest] | None = None
    _own: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    _orders: dict[int, PendingRequest] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether everything has come that belongs to it."""
        return self.agreed is not None and all(order.tensors is not None for order in self._orders.values())

    def take_stages(self) -> Iterator[StageState]:
        """Hand out the stages of a whole duplicate; each is forgotten as it is handed out."""
        agreed = self.agreed or {}
        for stage in sorted(self._own.keys() | self._orders.keys()):
            if stage in self._own:
                yield StageState(stage, OWNER, self._own.pop(stage), self.num_steps, None)
                continue
            order = self._orders.pop(stage)
            tensors, order.tensors, order.bulk = order.tensors or {}, None, None
            yield StageState(stage, order.party, tensors, self.num_steps, agreed.get(stage))
            del tensors


class Duplicates:
    """The owner's side: asks every holder for a copy, once, and notes the agreed states.

    Guarantees:
        At most one duplicate is under way, so at most one copy of the trained state is in the owner's memory, and one
        of each stage in its holder's: 12 bytes per trained number in either place.
    """

    def __init__(self, facts: StepFacts, requests: Requests, roles: Roles) -> None:
        self._facts = facts
        self._requests = requests
        self._roles = roles
        self._present_duplicate: Duplicate | None = None
        self._shapes: dict[int, dict[str, Tensor]] = {}

    def begin_duplicate(self, num_steps: int) -> Duplicate:
        """Ask for copies of the state after so many steps, before the next step begins."""
        self.abandon_duplicate("another one was started")
        facts, duplicate = self._facts, Duplicate(num_steps)
        self._present_duplicate = duplicate
        for stage, party in sorted(facts.assignment.holders.items()):
            if party == OWNER:
                state = self._roles.copy_of(stage).optimizer.state_tensors()
                duplicate._own[stage] = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
            else:
                request = FetchBulk(epoch=facts.ledger.epoch, step=num_steps, stage=stage, purpose="duplicate")
                if stage not in self._shapes:
                    # a stage is built once to know them
                    self._shapes[stage] = trained_shapes(facts.plan, stage)
                duplicate._orders[stage] = self._requests.order_tensors(party, request, self._shapes[stage])
        if not facts.plan.guard.is_enabled:
            duplicate.agreed = {}
        return duplicate

    def note_agreed(self, num_steps: int) -> None:
        """The states after so many steps are agreed on by now."""
        duplicate = self._present_duplicate
        if duplicate is not None and duplicate.agreed is None and duplicate.num_steps == num_steps:
            duplicate.agreed = dict(self._facts.agreed_states)

    def update_duplicate(self, lost: Collection[str]) -> None:
        """Give up a duplicate that a party, lost or slow, does not send, and forget one that is whole."""
        duplicate = self._present_duplicate
        if duplicate is None:
            return
        for stage, order in duplicate._orders.items():
            if order.tensors is not None:
                if order.num_steps != duplicate.num_steps:
                    self.abandon_duplicate(f"stage {stage}: {order.party} sent a state of step {order.num_steps}")
                    return
            elif order.party in lost:
                self.abandon_duplicate(f"stage {stage}: {order.party} is lost")
                return
            elif self._requests.has_lapsed(order):
                self.abandon_duplicate(f"stage {stage}: {order.party} did not send its state in time")
                return
        if duplicate.is_whole:
            self._forget_duplicate()

    def abandon_duplicate(self, reason: str) -> None:
        """Give up the duplicate under way, if there is one."""
        if self._present_duplicate is not None:
            self._present_duplicate.failure = reason
            self._forget_duplicate()

    def _forget_duplicate(self) -> None:
        self._present_duplicate = None
        self._requests.forget_orders()


class JournalNotes:
    """Reports verified states to the journal, once a step, as soon as the states are known to be verified.

    Args:
        owner: The owner's party, whose stages nobody else signs.
        note: Called with step, holders and digests of the verified states; None without a journal.
        records: Proofs of earlier steps; those that are complete are written before the state that follows them.
    """

    def __init__(self, facts: StepFacts, owner: Party, note: NoteVerified | None, records: StepRecords) -> None:
        self._facts = facts
        self.records = records
        self._hosted = owner.hosted
        self._note = note
        self._noted_step: int | None = None

    def forget_notes(self) -> None:
        """Forget reported steps, which may be undone, and report them again."""
        self.records.forget_pending()
        self._noted_step = None

    def note_verified_states(self) -> None:
        """Report that the states before the present step are verified, if that is new."""
        self.records.release_complete()
        facts, step = self._facts, self._facts.ledger.step
        if self._note is None or self._noted_step == step:
            return
        if any(holder.copy.step_count != step for holder in self._hosted.values()) or not self._is_known():
            return
        self._noted_step = step
        mine = (
            {s: holder.copy.compute_digest() for s, holder in self._hosted.items()}
            if facts.plan.guard.is_enabled
            else {}
        )
        self._note(step, facts.assignment.holders, {**mine, **facts.agreed_states})

    def _is_known(self) -> bool:
        facts = self._facts
        if facts.plan.guard.is_enabled:
            return facts.agreed_states.keys() >= set(facts.watched_stages) and facts.lagging_ledger is None
        # a party that commits has the state that it began with
        return len(facts.ledger.commits) == len(facts.assignment.holders)


class BytesByLink:
    """Bytes of frames by link, since they were last taken; ``a>b`` are those of a to b."""

    def __init__(self, owner: Endpoint) -> None:
        self._owner = owner
        self._last_totals: dict[str, int] = {}

    def take_new_bytes(self, reported: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
        """Return the bytes sent since the last call: the owner's as it saw them, others' as their senders say."""
        totals: dict[str, int] = {}
        for party, sent in reported.items():
            if party != OWNER:
                totals |= {f"{party}>{peer}": size for peer, size in sent.items()}
        totals |= {f"{OWNER}>{peer}": size for peer, size in self._owner.bytes_sent.items()}
        totals |= {f"{peer}>{OWNER}": size for peer, size in self._owner.bytes_received.items()}
        moved = {link: total - self._last_totals.get(link, 0) for link, total in totals.items()}
        self._last_totals = totals
        return moved


def claimed_links(links: Iterable[str]) -> tuple[str, ...]:
    """Those of the links of which the owner sees neither end: what crosses them is what its sender says."""
    return tuple(sorted(link for link in links if OWNER not in link.split(">")))
