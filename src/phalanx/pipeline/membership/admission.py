"""Admission to a run: decided by the results of a party's kernels on a fresh nonce, never by its own description."""

import secrets
from collections.abc import Collection
from dataclasses import dataclass, field

from phalanx.pipeline.config import OWNER
from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.protocol.greetings import ChallengeReply, KernelDigests
from phalanx.pipeline.stage.kernel_fingerprint import NONCE_BYTES, fingerprint_kernels
from phalanx.pipeline.tolerance.numeric_class import NumericClass, local_numeric_class


@dataclass
class ClassMeasurement:
    """One nonce, and the answers of all parties that it was sent to."""

    nonce: str = field(default_factory=lambda: secrets.token_hex(NONCE_BYTES))
    answers: dict[str, KernelDigests] = field(default_factory=dict)

    def add_answer(self, party: str, answer: ChallengeReply) -> bool:
        """Take an answer; False for one to another nonce, or a second one."""
        if answer.nonce != self.nonce or party in self.answers:
            return False
        self.answers[party] = answer.found
        return True


class Admission:
    """The admission measures the numeric class of each party, or says why it is refused.

    Guarantees:
        Two parties are of one class only if both gave the same digests for a nonce that was drawn after both had said
        hello. A party that answers wrong on purpose is refused, or in a mixed fleet compared by distance and announced
        as such; one that has an accomplice answer for it is compared bit by bit. No party is exempt from a check.

    Attributes:
        classes: Numeric class of every party that was let in, the owner included; named after the first party in it.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.classes: dict[str, str] = {OWNER: OWNER}
        self._plan = plan
        self._description = local_numeric_class(plan.device)

    @property
    def is_needed(self) -> bool:
        """Whether kernels are measured: where bits are compared and depend on the party that computes them."""
        return self._plan.guard.is_enabled and self._plan.numerics == "float"

    def answer_as_owner(self, measurement: ClassMeasurement) -> None:
        """Compute the kernel fingerprint here."""
        measurement.answers[OWNER] = fingerprint_kernels(self._plan, measurement.nonce)

    def refusal_reason(self, party: str, described: NumericClass, measurement: ClassMeasurement) -> str | None:
        """Why a party that has answered is not let in; None when it is."""
        answer, owner_answer = measurement.answers[party], measurement.answers[OWNER]
        return None if answer == owner_answer else self._describe_refusal(party, described, answer, owner_answer)

    def assign_class(self, party: str, measurement: ClassMeasurement) -> None:
        """Find the class of a party that is let in, among the members that answered the same nonce."""
        measured = [name for name in self.classes if name in measurement.answers]
        same = (name for name in measured if measurement.answers[name] == measurement.answers[party])
        first = next(same, None)
        self.classes[party] = party if first is None else self.classes[first]

    def admit_by_law(self, party: str) -> None:
        """Count a party to the owner's class where the law of arithmetic gives all parties the same bits."""
        if self._plan.numerics != "float":
            self.classes[party] = OWNER

    def foreign_class_parties(self, present: Collection[str]) -> list[str]:
        """Return one present party of each class but the owner's."""
        of = {label: party for party, label in self.classes.items() if party in present and label != OWNER}
        return list(of.values())

    def _describe_refusal(
        self, party: str, described: NumericClass, found: KernelDigests, own: KernelDigests
    ) -> str | None:
        other = [name for name, digest in found.model_dump().items() if digest != getattr(own, name)]
        bits = f"{party} computes other bits than the owner ({', '.join(other)})"
        unlike = described.describe_difference(self._description)
        if self._plan.guard.classes == "one":
            how = f"; differences: {unlike}" if unlike else ", although its description equals the owner's"
            return (
                f"{bits}{how}; give it the owner's number of threads, torch build and device, or admit several "
                'numeric classes with guard.classes = "mixed"'
            )
        if not unlike:
            return f"{bits}, although its description equals the owner's; a party with a wrong description is refused"
        if "update" in other:
            return f"{bits}; also in a mixed fleet all parties must make the same bits of an update"
        return None
