"""L3 after a change of roles: every copy of a stage must be the agreed one."""

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import VerificationError
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.messages import Ready, StateDigest
from phalanx.pipeline.protocol.signed import STATE, StatementKey
from phalanx.pipeline.verify.facts import Judgement, Signed, StepFacts

NOTHING_KNOWN: Mapping[int, StateDigest] = {}


@dataclass(frozen=True)
class UnreadyParty:
    """A party with another state than the agreed one.

    Attributes:
        party: None where a newcomer and the worker that sent it the state contradict each other without proof.
    """

    party: str | None
    stage: int
    reason: str
    judgement: Judgement | None = None


class StateAgreement:
    """A comparison of the states that parties got ready with.

    Guarantees:
        A state counts as agreed only where two parties that made the last update themselves have signed it and no such
        party another one, or where the owner made it: a copy never vouches for its source. What a lost party signed
        before it was lost counts.

    Attributes:
        to_weigh: States that were not agreed on before the interruption, by stage and party; they are
            weighed like any state after an update.
        unwitnessed: Stages whose last update must be undone, because no two parties made it and signed the same: the
            signed states of those that made it.
    """

    def __init__(self, facts: StepFacts, known: Mapping[int, StateDigest] = NOTHING_KNOWN) -> None:
        """`known`: each stage's digest where all parties begin anew."""
        self.unwitnessed: dict[int, dict[str, StateDigest]] = {}
        self.to_weigh: dict[int, dict[str, StateDigest | None]] = {}
        self._facts = facts
        self._known = dict(known)

    def agree_states(self, ready: Mapping[str, Ready], old: Assignment | None) -> UnreadyParty | None:
        """Agree on every stage's state, or find the party that stands in the way.

        Args:
            old: The assignment before; None when all parties begin anew.
        """
        facts = self._facts
        self.to_weigh.clear()
        self.unwitnessed.clear()
        for stage in facts.assignment.shadows:
            parties = facts.assignment.parties_of(stage)
            states = {name: ready[name].states.get(str(stage)) for name in parties}
            expected = self._known.get(stage) if old is None else facts.agreed_states.get(stage)
            if old is not None and expected is None:
                signed = self._own_updates(stage, states)
                if signed.keys() == states.keys():
                    self.to_weigh[stage] = states
                    continue
                expected = _agreed_among(signed)
                if expected is None:
                    self.unwitnessed[stage] = {name: state for name, state in signed.items() if state is not None}
                    continue
            wrong = [name for name, state in states.items() if state != expected]
            if not wrong and expected is not None:
                facts.agreed_states[stage] = expected
                continue
            reason = (
                f"stage {stage}: {', '.join(wrong) or parties[0]} reported ready with a state other than the agreed one"
            )
            if old is None:
                return UnreadyParty(wrong[0] if wrong else parties[0], stage, reason)
            return self._blame_party(stage, wrong[0], old, reason)
        return None

    def _expected_and_ready(self, name: str, stage: int) -> Mapping[str, Signed]:
        """Return the expected state of a party as it signed it, and the state that it signed now."""
        facts = self._facts
        agreed = facts.agreed_states.get(stage) or facts.previous_states.get(stage)
        ready = facts.record.get_statement(StatementKey(STATE, name, facts.ledger.epoch, facts.ledger.step, stage))
        return {
            "agreed": None if agreed is None else facts.record.signed_state(name, stage, agreed),
            "ready": None if ready is None else ready.header,
        }

    def _own_updates(self, stage: int, states: Mapping[str, StateDigest | None]) -> dict[str, StateDigest | None]:
        """Return the states of a stage by the parties that made the last update themselves, lost ones included."""
        facts, previous = self._facts, self._facts.previous
        signed: dict[str, StateDigest | None] = {}
        for party in facts.updated_by.parties_of(stage):
            if party in states and (stage, party) not in facts.copied:
                signed[party] = states[party]
            elif previous is not None:
                key = StatementKey(STATE, party, previous.epoch, facts.ledger.step, stage)
                stored = facts.record.get_statement(key)
                if stored is not None and isinstance(stored.content, StateDigest):
                    signed[party] = stored.content
        return signed

    def confirmed_copies(self, ready: Mapping[str, Ready]) -> set[tuple[int, str]]:
        """Stages and parties that got ready in exactly the agreed state."""
        agreed = self._facts.agreed_states
        return {
            (stage, name)
            for stage, state in agreed.items()
            for name in ready
            if ready[name].states.get(str(stage)) == state
        }

    def _blame_party(self, stage: int, name: str, old: Assignment, reason: str) -> UnreadyParty:
        """Convict a party that altered a kept copy; name a newcomer, or its source, where the owner was the other."""
        if name in {*old.parties_of(stage)} - {OWNER}:
            judgement = self._facts.make_judgement(
                "state", name, stage, reason, headers=self._expected_and_ready(name, stage)
            )
            return UnreadyParty(name, stage, reason, judgement)
        source = self._facts.sources[stage]
        if source == OWNER == name:
            raise VerificationError(f"{reason}; resume from the last checkpoint")
        return UnreadyParty(source if name == OWNER else name if source == OWNER else None, stage, reason)


def _agreed_among(signed: Mapping[str, StateDigest | None]) -> StateDigest | None:
    """Return the state that the owner made, or that several parties made alike; None where there is neither."""
    if OWNER in signed:
        return signed[OWNER]
    states = list(signed.values())
    return states[0] if len(states) > 1 and all(state == states[0] for state in states) else None
