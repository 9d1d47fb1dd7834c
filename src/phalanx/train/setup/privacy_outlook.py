"""The privacy of a federated run before it trains: noise beside the largest update, and rounds that are paid for."""

import math
from dataclasses import dataclass

from phalanx.federated.config import FederatedConfig
from phalanx.federated.rounds.terms import noisy_rounds
from phalanx.security.privacy import PoissonGaussian, PrivacyConfig, check_rate, min_noise_multiplier
from phalanx.train.config import FederatedRun

MAX_RATIO = 1.0
"""Ratio of noise to the largest update above which a run warns."""


@dataclass(frozen=True)
class NoiseOutlook:
    """The noise in a round's mean update beside the largest one that there can be, where all sites take part.

    Attributes:
        protected: Whose data the bound is about, and against whom.
        ratio: Euclidean norm of the noise in the mean of all sites over that of the largest update without noise.
        paid_rounds: Rounds that the budget pays for, `rounds` at most.
    """

    protected: str
    ratio: float
    largest: str
    num_values: int
    rounds: int
    paid_rounds: int
    epsilon: float
    delta: float
    cure: str

    def describe_budget(self) -> list[str]:
        """Return the lines that a person must read before the run."""
        return [
            f"privacy: protects {self.protected}; epsilon {self.epsilon:g} at delta {self.delta:g} for the whole run",
            f"privacy: the budget allows {self.paid_rounds} of {self.rounds} rounds",
            f"privacy: noise relative to the largest update: ratio {self.ratio:.3g} ({self.largest}, "
            f"{self.num_values:,} trained values)",
        ]

    def noise_warning(self) -> str | None:
        """Say that noise is larger than any update; None where it is not."""
        if self.ratio <= MAX_RATIO:
            return None
        return (
            f"WARNING: privacy: the noise of a round is {self.ratio:.3g} times the largest update, so the model may "
            f"become worse than it was before training; {self.cure}"
        )


def sums_outlook(section: FederatedConfig, rounds: int, length: int) -> NoiseOutlook | None:
    """Return the outlook of sites that bring noise to sums; None where they bring none."""
    wanted, sums = section.privacy, noisy_rounds(section, rounds, length)
    if wanted is None or sums is None:
        return None
    clients = section.cohort_sizes[-1]
    plan, colluding = sums.noisy_sum(clients), (clients - 1) // 3
    # each site brings its share, also those on which the bound does not count
    noise = math.sqrt(float(plan.noise_variance) * length / section.num_asked)
    return NoiseOutlook(
        protected=f"all data of one site, against the owner {_with_sites(colluding, clients)}",
        ratio=noise / plan.ring_encoding.max_level,
        largest=f"max_norm = {section.max_norm:g}",
        num_values=length,
        rounds=rounds,
        paid_rounds=sums.affordable_steps(wanted.epsilon, wanted.delta, rounds),
        epsilon=wanted.epsilon,
        delta=wanted.delta,
        cure="have more sites, train fewer values (a smaller model.adapter.rank), use fewer rounds, or raise "
        "federated.privacy.epsilon; for updates smaller than max_norm the ratio is even larger",
    )


def _with_sites(colluding: int, sites: int) -> str:
    return f"and {colluding} of {sites} colluding sites" if colluding else "without colluding sites"


def rows_outlook(run: FederatedRun, wanted: PrivacyConfig, rows: int, length: int) -> NoiseOutlook:
    """Return the outlook of sites with private rows.

    Args:
        wanted: Its ``[privacy]``.
        rows: Training rows of the site that has fewest.
    """
    section, batch_size = run.federated, run.train.batch_size
    steps = run.train.steps * section.local_steps
    share = check_rate(rows, batch_size, wanted.delta)
    rate = share if wanted.sampling == "poisson" else 1.0
    multiplier = wanted.noise_multiplier or min_noise_multiplier(wanted.epsilon, wanted.delta, rate, steps)
    paid = PoissonGaussian(multiplier, rate).affordable_steps(wanted.epsilon, wanted.delta, steps)
    # noise of steps and sites is independent, and gradients at most point the same way
    independent = math.sqrt(section.local_steps * section.num_asked)
    return NoiseOutlook(
        protected="one training row of a site, against everybody who sees its updates",
        ratio=multiplier * math.sqrt(length) / (batch_size * independent),
        largest=f"each gradient at privacy.clip_norm = {wanted.clip_norm:g}",
        num_values=length,
        rounds=run.train.steps,
        paid_rounds=paid // section.local_steps,
        epsilon=wanted.epsilon,
        delta=wanted.delta,
        cure="raise train.batch_size or federated.local_steps, have more rows and sites, train fewer values (a smaller "
        "model.adapter.rank), or raise privacy.epsilon",
    )


def noise_outlooks(run: FederatedRun, length: int, min_rows: int | None) -> list[NoiseOutlook]:
    """Return the outlook of each kind of noise that a federated run has.

    Args:
        min_rows: Training rows of the site that has fewest; None where this process does not know.
    """
    sums = sums_outlook(run.federated, run.train.steps, length)
    outlooks = [] if sums is None else [sums]
    if run.privacy is not None and min_rows is not None:
        outlooks.append(rows_outlook(run, run.privacy, min_rows, length))
    return outlooks
