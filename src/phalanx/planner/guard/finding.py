"""The guard in a plan: after how many steps each kind of lie is found, and what verification and sealing cost."""

import json
import math
from dataclasses import dataclass
from importlib import resources

from phalanx.planner.guard.price_law import (
    STATE_BYTES,
    AuditLoad,
    PriceLaw,
    StepSize,
    extra_bytes_share,
    state_bytes_per_number,
)

AUDITED_SHARE = 0.72
"""Forward and backward to the inputs, in parts of a microbatch's whole work."""

FIXED_SHARE = 0.015
"""Signing, hashing and comparing, in parts of a step's work."""

SEALED_BYTES_PER_S = 1.26e9
"""TLS 1.3 with AES-256-GCM over one connection, both ends on one core of the machine that it was measured on."""


@dataclass(frozen=True)
class Verification:
    """The share of others' work that is done again.

    Attributes:
        audit_rate: q: the share of microbatches recomputed forward and backward to the inputs.
        step_audit_rate: p: how often a whole step is recomputed, weight gradients included.
        owner_audit_rate: Share of steps that the owner recomputes as a whole.
    """

    audit_rate: float
    step_audit_rate: float = 0.0
    owner_audit_rate: float = 0.0

    @property
    def extra_compute(self) -> float:
        """Compute beyond the unguarded run's, as a share of it. Source: the design's section 2: ``0.72 q + p``."""
        return AUDITED_SHARE * self.audit_rate + self.step_audit_rate + self.owner_audit_rate + FIXED_SHARE

    def extra_time(self, bubble: float) -> float:
        """Share of a step's time that is added when audits fill the pipeline's idle time first.

        Args:
            bubble: Idle share of the unguarded step; recomputation fits in there, fixed costs do not.
        """
        recomputed = self.extra_compute - FIXED_SHARE
        busy = 1.0 - bubble
        return max(0.0, recomputed * busy - bubble) + FIXED_SHARE * busy


def sealed_bandwidth(bytes_per_s: float, cipher_bytes_per_s: float = SEALED_BYTES_PER_S) -> float:
    """Bytes a second over a link that encrypts before it sends, one after the other."""
    return 1.0 / (1.0 / bytes_per_s + 1.0 / cipher_bytes_per_s)


@dataclass(frozen=True)
class GuardCosts:
    """Measured shares of the gradient screen; a test compares each with the raw results that are named.

    Attributes:
        doubted_honest: Honest weight gradients that the screen doubts, the most of any measured model.
        found_gross: Gross lies about a weight gradient that it doubts, the least of any measured model and lie.
    """

    doubted_honest: float
    found_gross: float
    sources: dict[str, str]


def measured_costs() -> GuardCosts:
    """The shipped figures."""
    text = resources.files("phalanx.planner").joinpath("data", "guard_costs.json").read_text(encoding="utf-8")
    return GuardCosts(**json.loads(text))


CERTAINTY = 0.999


@dataclass(frozen=True)
class AuditRates:
    """The rates at which workers' stages are audited.

    Attributes:
        stages: K, the owner's first and last one included.
        audit_rate: q: ceil(q M) microbatches of each stage and step are recomputed.
        step_audit_rate: p: how often the shadow recomputes a whole step.
        owner_audit_rate: r: how often the owner does.
        min_audits: 0: where q M is below 1, one microbatch in that share of the steps.
        gradient_screen: Whether an audited microbatch screens the claimed weight gradient.
        reach: Minimum number of steps that a conviction goes back.
        kept_every: Steps from one state that the owner keeps to the next; 0 where it keeps none.
        shadows: Copies of a stage besides its holder's.
    """

    stages: int
    microbatches: int
    audit_rate: float
    step_audit_rate: float
    owner_audit_rate: float
    gradient_screen: bool
    reach: int = 0
    kept_every: int = 0
    min_audits: int = 1
    shadows: int = 1

    @property
    def num_drawn(self) -> int:
        """Microbatches of a stage that are recomputed in a step with any."""
        return math.ceil(self.audit_rate * self.microbatches)

    @property
    def draw_chance(self) -> float:
        """Share of the steps in which any microbatch of a stage is drawn."""
        return 1.0 if self.min_audits else min(1.0, self.audit_rate * self.microbatches)

    @property
    def audit_load(self) -> AuditLoad:
        """The audits of a stage and step, in the mean."""
        drawn = (1.0 - self.step_audit_rate) * self.draw_chance * self.num_drawn
        drawn += self.step_audit_rate * self.microbatches
        return AuditLoad(drawn, self.owner_audit_rate, self.gradient_screen, self.kept_every, self.shadows)

    def miss_messages(self, wrong: int) -> float:
        """Return the probability that a step's audits meet none of its wrong microbatches."""
        missed = 1.0 - self.draw_chance * (1.0 - miss_probability(self.num_drawn, wrong, self.microbatches))
        return missed * (1.0 - self.whole_step_chance)

    @property
    def whole_step_chance(self) -> float:
        """Chance that a step of one stage is recomputed as a whole, by its shadow or by the owner."""
        return 1.0 - (1.0 - self.step_audit_rate) * (1.0 - self.owner_audit_rate)


@dataclass(frozen=True)
class DetectionOdds:
    """The odds that one kind of lie is found.

    Attributes:
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

    def slip_probability(self, lying_steps: int) -> float:
        """Return the probability that a party which lies in so few steps of a run is found in none of them.

        What is found in no step stays: the run ends with it, and nothing of it is undone.
        """
        return (1.0 - self.probability) ** lying_steps


@dataclass(frozen=True)
class GuardPrice:
    """The price of a guard beside an unguarded run.

    Attributes:
        extra_compute: Share of the unguarded run's work, of all parties together.
        extra_bytes: Share of the bytes that cross between the unguarded stages.
        memory_bytes: Memory of all parties together: the other copies, and what undoes a step.
        bytes_per_number: Bytes a step for each number that is trained in other hands.
        disk_per_number: Bytes on the owner's disk for each trained number and kept state.
    """

    extra_compute: float
    extra_bytes: float
    memory_bytes: float
    bytes_per_number: float
    disk_per_number: float


def miss_probability(drawn: int, wrong: int, microbatches: int) -> float:
    """Probability that none of `drawn` microbatches is one of the wrong ones, which their author chose at random."""
    return math.comb(microbatches - wrong, drawn) / math.comb(microbatches, drawn)


def odds_by_lie(watch: AuditRates, costs: GuardCosts) -> list[DetectionOdds]:
    """Every kind of lie of a stage in other hands; the screen's share is that of the least found gross lie."""
    shared = 1.0 - watch.whole_step_chance
    gross = 1.0 - (1.0 - (costs.found_gross if watch.gradient_screen else 0.0)) * shared
    half = watch.microbatches // 2 or 1
    chances = {
        "messages of every microbatch": 1.0 - watch.miss_messages(watch.microbatches),
        f"messages of {half} of {watch.microbatches} microbatches": 1.0 - watch.miss_messages(half),
        f"messages of 1 of {watch.microbatches} microbatches": 1.0 - watch.miss_messages(1),
        "weight gradient, gross (sign, largest numbers, ten times)": gross,
        "weight gradient, subtle": watch.whole_step_chance,
        "optimizer or state": 1.0,
        "anything, holder and shadow in league": watch.owner_audit_rate,
        "anything, all workers in league": watch.owner_audit_rate,
    }
    return [_detection_odds(lie, chance, watch.reach) for lie, chance in chances.items()]


def price_guard(watch: AuditRates, law: PriceLaw, size: StepSize, upkeep_bytes: float) -> GuardPrice:
    """Return the cost of verification by the measured law; an honest gradient that the screen doubts is not in it.

    Args:
        upkeep_bytes: Bytes a step and trained number that keep one shadow fresh.
    """
    load = watch.audit_load
    return GuardPrice(
        extra_compute=law.extra_share(size, load),
        extra_bytes=extra_bytes_share(size, load, upkeep_bytes),
        memory_bytes=size.watched_parameters * law.memory_number_bytes * watch.shadows,
        # the owner fetches a stage that it redoes, and those that it keeps
        bytes_per_number=state_bytes_per_number(load, upkeep_bytes),
        disk_per_number=STATE_BYTES if watch.kept_every else 0.0,
    )


def _detection_odds(lie: str, probability: float, reach: int) -> DetectionOdds:
    if probability <= 0.0:
        return DetectionOdds(lie, 0.0, None, None, is_undone=False)
    certain = 1 if probability >= CERTAINTY else math.ceil(math.log(1.0 - CERTAINTY) / math.log1p(-probability))
    # what is found in its first step is never applied
    return DetectionOdds(lie, probability, 1.0 / probability, certain, is_undone=certain - 1 <= reach)
