"""After how many steps each kind of lie is found, and what looking for it costs: formulas over the rates of a run."""

import math
from dataclasses import dataclass

from phalanx.planner.guard.guarding import GuardCosts

CERTAINTY = 0.999


@dataclass(frozen=True)
class AuditRates:
    """The rates at which workers' stages are audited.

    Attributes:
        stages: K, the owner's first and last one included.
        microbatches: M.
        audit_rate: q: ceil(q M) microbatches of each stage and step are recomputed.
        step_audit_rate: p: how often the shadow recomputes a whole step.
        owner_audit_rate: r: how often the owner does.
        gradient_screen: Whether an audited microbatch screens the claimed weight gradient.
        states_agree: Whether holder and shadow both make each update and compare what it leads to.
        reach: How many steps a conviction goes back at least.
    """

    stages: int
    microbatches: int
    audit_rate: float
    step_audit_rate: float
    owner_audit_rate: float
    gradient_screen: bool
    states_agree: bool = True
    reach: int = 0

    @property
    def drawn(self) -> int:
        """Microbatches of a stage that are recomputed in every step."""
        return math.ceil(self.audit_rate * self.microbatches)

    @property
    def whole(self) -> float:
        """How likely a step of one stage is recomputed as a whole, by its shadow or by the owner."""
        return 1.0 - (1.0 - self.step_audit_rate) * (1.0 - self.owner_audit_rate)


@dataclass(frozen=True)
class DetectionOdds:
    """The odds that one kind of lie is found.

    Attributes:
        lie: Which.
        probability: That a step with such a lie is found to be wrong before it is applied.
        expected_steps: Attacked steps until then, in the mean; None without audits.
        certain_steps: Attacked steps within which it is found with a probability of 99.9 %.
        is_undone: Whether a conviction goes back that far, where every step is attacked.
    """

    lie: str
    probability: float
    expected_steps: float | None
    certain_steps: int | None
    is_undone: bool


@dataclass(frozen=True)
class GuardPrice:
    """The price of a guard beside an unguarded run.

    Attributes:
        extra_compute: Share of the unguarded run's work, of all parties together.
        bytes_per_number: Bytes a step for each number that is trained in other hands.
        memory_per_number: Bytes for each trained number at each copy of its stage, to go back with.
    """

    extra_compute: float
    bytes_per_number: float
    memory_per_number: float


def missed(drawn: int, wrong: int, microbatches: int) -> float:
    """Probability that none of `drawn` microbatches is one of the wrong ones, which their author chose at random."""
    return math.comb(microbatches - wrong, drawn) / math.comb(microbatches, drawn)


def findings(watch: AuditRates, costs: GuardCosts) -> list[DetectionOdds]:
    """Every kind of lie of a stage in other hands; the screen's share is that of the least found gross lie."""
    shared = 1.0 - watch.whole
    few = 1.0 - missed(watch.drawn, 1, watch.microbatches) * shared
    gross = 1.0 - (1.0 - (costs.found_gross if watch.gradient_screen else 0.0)) * shared
    half = watch.microbatches // 2 or 1
    chances = {
        "messages of every microbatch": 1.0,
        f"messages of {half} of {watch.microbatches} microbatches": 1.0
        - missed(watch.drawn, half, watch.microbatches) * shared,
        f"messages of 1 of {watch.microbatches} microbatches": few,
        "weight gradient, gross (sign, largest numbers, ten times)": gross,
        "weight gradient, subtle": watch.whole,
        "optimizer or state": 1.0 if watch.states_agree else watch.owner_audit_rate,
        "anything, holder and shadow in league": watch.owner_audit_rate,
        "anything, all workers in league": watch.owner_audit_rate,
    }
    return [_finding(lie, chance, watch.reach) for lie, chance in chances.items()]


def price(watch: AuditRates, costs: GuardCosts, untrusted_share: float, upkeep_bytes: float) -> GuardPrice:
    """What it costs, from shares that were measured.

    Args:
        watch: The rates.
        costs: What was measured.
        untrusted_share: Work of the stages in other hands, as a share of the model's.
        upkeep_bytes: Bytes a step and trained number that keep a shadow fresh.
    """
    audited = costs.screened_share if watch.gradient_screen else costs.audited_share
    doubted = costs.doubted_honest if watch.gradient_screen else 0.0
    redone = audited * watch.drawn / watch.microbatches + watch.step_audit_rate + watch.owner_audit_rate + doubted
    return GuardPrice(
        extra_compute=untrusted_share * redone + costs.fixed_share,
        # the owner fetches weights and moments of a stage that it redoes
        bytes_per_number=upkeep_bytes + 12.0 * watch.owner_audit_rate,
        memory_per_number=24.0 if watch.reach else 0.0,
    )


def _finding(lie: str, probability: float, reach: int) -> DetectionOdds:
    if probability <= 0.0:
        return DetectionOdds(lie, 0.0, None, None, is_undone=False)
    certain = 1 if probability >= CERTAINTY else math.ceil(math.log(1.0 - CERTAINTY) / math.log1p(-probability))
    # what is found in its first step is never applied
    return DetectionOdds(lie, probability, 1.0 / probability, certain, is_undone=certain - 1 <= reach)
