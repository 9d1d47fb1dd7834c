"""The budget ledger of a run: one signed line of its audit log for every batch that is drawn.

A batch is charged before it is drawn, and whatever becomes of it: a step that is done again after a crash draws another
sample, gets other noise, and is charged again. Lines of the log cannot be taken back unseen, so neither can charges.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from phalanx.errors import AuditLogError, ConfigError, PrivacyBudgetError
from phalanx.security.audit import AuditLog

TERMS = "privacy_terms"
"""Kind of the entry with the terms of all charges; a run has one."""
CHARGED = "privacy_charged"
"""Kind of the line of one charge."""
_GROWTH = 1.25


class PrivateMechanism(Protocol):
    """The mechanism of every charge of a run, and the epsilon of many charges."""

    @property
    def noise_multiplier(self) -> float:
        """Return the standard deviation of the noise over the clipping bound."""

    @property
    def rate(self) -> float:
        """Chance to be in one sample; 1 where nothing is known of it."""

    def epsilon_after(self, steps: int, delta: float) -> float:
        """Return the epsilon that so many spend at a delta; an upper bound."""

    def affordable_steps(self, epsilon: float, delta: float, at_most: int) -> int:
        """Return how many stay within an epsilon, or `at_most` where as many do."""


@dataclass
class PastCharges:
    """The charges that a verified log tells.

    Attributes:
        terms: Terms that all charges share; None where the run has none yet.
    """

    terms: dict[str, Any] | None = None
    count: int = 0

    def read_entry(self, kind: str, body: dict[str, Any]) -> None:
        """Take one line, in the order of the log."""
        if kind == TERMS:
            if self.terms is not None:
                raise AuditLogError("audit log: the privacy terms of the run stand there twice")
            self.terms = body
        elif kind == CHARGED:
            if self.terms is None or body.get("number") != self.count:
                raise AuditLogError(
                    f"audit log: charge {body.get('number')} of the privacy budget, expected {self.count} after the "
                    "run's terms"
                )
            self.count += 1


@dataclass
class BudgetLedger:
    """The privacy budget of one run, of which every batch takes its part.

    Args:
        delta: The chance that the bound does not hold.
        terms: Other terms of the first line: how rows are drawn, and the protected unit.
        session: Charges of this session at most.

    Guarantees:
        No number is given out twice, through crashes and restarts. `epsilon_spent` is at least what all charged steps
        have spent together, and at most `epsilon`.
    """

    log: AuditLog
    step: PrivateMechanism
    epsilon: float
    delta: float
    terms: dict[str, Any]
    past: PastCharges
    session: int
    _known: tuple[int, float] = field(default=(0, 0.0), init=False)

    def __post_init__(self) -> None:
        """Compute the number of affordable charges, and compare the terms with the terms of earlier sessions."""
        self.affordable = self.step.affordable_steps(self.epsilon, self.delta, self.past.count + self.session)
        self.terms = {
            **self.terms,
            "noise_multiplier": self.step.noise_multiplier,
            "rate": self.step.rate,
            "epsilon": self.epsilon,
            "delta": self.delta,
        }
        for key, value in self.terms.items() if self.past.terms is not None else ():
            if (charged := (self.past.terms or {}).get(key)) != value:
                raise ConfigError(
                    f"[privacy]: {key} is {value}, earlier steps of this run were charged for {charged}; "
                    "take back what was changed, or begin another run"
                )

    def charge_batch(self) -> int:
        """Charge one batch, and return the number of the charge; no other batch of the run has it.

        Raises:
            PrivacyBudgetError: The budget does not pay for another one.
            DiskError: The charge cannot be written; then nothing may be drawn.
        """
        if self.is_spent:
            raise PrivacyBudgetError(
                f"privacy: {self.num_charges} steps have spent epsilon {self.epsilon_spent:.3f} of {self.epsilon}, and "
                "another one would spend more; the run has to end here"
            )
        if self.past.terms is None:
            self._write_entry(TERMS, self.terms)
        number = self.past.count
        self._write_entry(CHARGED, {"number": number})
        return number

    def charge_batches(self, count: int) -> range:
        """Charge so many batches, all of them or none, and have that on the disk; return the numbers of the charges.

        Raises:
            PrivacyBudgetError: The budget does not pay for all of them; none is charged.
            DiskError: The charges cannot be written; then nothing may be drawn.
        """
        if self.num_left < count:
            raise PrivacyBudgetError(
                f"privacy: {self.num_charges} steps have spent epsilon {self.epsilon_spent:.3f} of {self.epsilon}, and "
                f"{count} more would spend more; no further one is made"
            )
        numbers = [self.charge_batch() for _ in range(count)]
        self.log.sync_events()
        return range(numbers[0], numbers[-1] + 1)

    @property
    def num_left(self) -> int:
        """Number of further batches that the budget pays for."""
        return max(0, self.affordable - self.num_charges)

    @property
    def num_charges(self) -> int:
        """Number of charged batches."""
        return self.past.count

    @property
    def is_spent(self) -> bool:
        """Whether the budget does not pay for another batch."""
        return self.num_charges >= self.affordable

    @property
    def epsilon_spent(self) -> float:
        """The epsilon that all charges have spent."""
        return self.step.epsilon_after(self.num_charges, self.delta)

    @property
    def epsilon_bound(self) -> float:
        """A bound of `epsilon_spent` that is quickly told: of the charges, rounded up by a quarter at most."""
        if self.num_charges > self._known[0]:
            steps = min(self.affordable, int(self.num_charges * _GROWTH) + 1)
            self._known = (steps, self.step.epsilon_after(steps, self.delta))
        return self._known[1]

    def summary_fields(self) -> dict[str, Any]:
        """Return what summary and report say."""
        return {**self.terms, "charges": self.num_charges, "epsilon_spent": self.epsilon_spent}

    def _write_entry(self, kind: str, body: dict[str, Any]) -> None:
        self.log.append_event(kind, body)
        self.past.read_entry(kind, body)
