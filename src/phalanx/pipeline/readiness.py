"""L3 after a change of roles: every copy of a stage must be the one that was agreed on."""

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import VerificationError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.docket import Docket, Judgement
from phalanx.pipeline.messages import Ready, StateDigest
from phalanx.pipeline.recovery import Assignment, roles_of


@dataclass(frozen=True)
class Unready:
    """A party with another state than the agreed one; without a judgement nobody knows whose fault that is."""

    party: str
    reason: str
    judgement: Judgement | None = None


class Readiness:
    """Compares the states that parties got ready with.

    Attributes:
        to_weigh: States that were not agreed on before the interruption, by stage and party; they are
            weighed like any state after an update.
    """

    def __init__(self, docket: Docket) -> None:
        self.to_weigh: dict[int, dict[str, StateDigest | None]] = {}
        self._docket = docket
        self._doubted: set[tuple[int, str]] = set()

    def check(
        self, ready: Mapping[str, Ready], known: Mapping[int, StateDigest] | None, old: Assignment | None
    ) -> Unready | None:
        """Agree on every stage's state, or find who stands in the way.

        Args:
            ready: What each party said.
            known: At the first start: each stage's digest as the owner knows it.
            old: The assignment before; None at the first start.

        Raises:
            VerificationError: At the first start, or where nobody else is left.
        """
        docket = self._docket
        self.to_weigh.clear()
        covered = [
            (roles.holders[stage], stage, shadow)
            for roles in (docket.assignment, docket.resting)
            for stage, shadow in roles.shadows.items()
        ]
        for holder, stage, shadow in covered:
            states = {name: ready[name].states.get(str(stage)) for name in (holder, shadow)}
            expected = docket.agreed.get(stage) if known is None else known.get(stage)
            if known is None and expected is None:
                self.to_weigh[stage] = states
                continue
            wrong = [name for name, state in states.items() if state != expected]
            if not wrong and expected is not None:
                docket.agreed[stage] = expected
                continue
            reason = f"stage {stage}: {', '.join(wrong) or holder} got ready with another state than the agreed one"
            if old is None:
                raise VerificationError(f"{reason}; start the run again without it")
            return self._blame(stage, wrong[0], old, reason)
        return None

    def _blame(self, stage: int, name: str, old: Assignment, reason: str) -> Unready:
        """Whoever altered a kept copy is guilty; of two newcomers the second speaks against their source."""
        if name in (old.holders[stage], old.shadows.get(stage)) and name != OWNER:
            return Unready(name, reason, self._docket.judgement("state", name, stage, reason))
        source = next(role.source for role in roles_of(self._docket.assignment, old) if role.stage == stage)
        doubtful = name == OWNER or (stage, source) in self._doubted
        self._doubted.add((stage, source))
        if source == OWNER and name == OWNER:
            raise VerificationError(f"{reason}; resume from the last checkpoint")
        return Unready(source if doubtful and source != OWNER else name, reason)
