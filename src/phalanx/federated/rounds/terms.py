"""The terms that owner and sites have from their own run files, and the privacy budget of one site."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import AggregationError, PrivacyBudgetError
from phalanx.federated.config import FederatedConfig, SitePrivacyConfig
from phalanx.security.aggregate import SumRefusal, SumTerms
from phalanx.security.crypto import Peer, lock_file, read_number, write_number
from phalanx.security.privacy import NoisyRounds, PrivacyConfig, epsilon_of_rho


@dataclass(frozen=True)
class RunTerms:
    """The facts of a run; no party takes another one's word for them.

    Attributes:
        rows: Budget of the training rows of each site, which it draws and counts by itself; None where sites train
            without noise.
        kept_as: Name under which a site keeps control variates of the run; its name `run` when empty, which is another
            one after a resume that changes the run file.
    """

    run: str
    digest: str
    config: FederatedConfig
    seed: int
    owner: Peer
    roster: Mapping[str, Peer]
    rounds: int
    rows: PrivacyConfig | None = None
    kept_as: str = ""

    def noisy_rounds(self, length: int) -> NoisyRounds | None:
        """Return the noisy sums of the run, of so many values; None where sites bring no noise."""
        return noisy_rounds(self.config, self.rounds, length)


def noisy_rounds(config: FederatedConfig, rounds: int, length: int) -> NoisyRounds | None:
    """Return the noisy sums of this many rounds, of `length` values; None where sites bring no noise."""
    privacy, sizes = config.privacy, config.cohort_sizes
    if privacy is None:
        return None
    sums = NoisyRounds(sizes[0], sizes[-1], config.min_cohort, length, privacy.noise_multiplier or 1.0)
    if privacy.noise_multiplier is not None:
        return sums
    return sums.with_noise_for(rounds, privacy.epsilon, privacy.delta)


_BUDGET = "spent_pico_rho"
_PICO = 10**12


class SiteBudget:
    """The spent budget of one site's noisy sums, over all runs of its directory, in a file of its own there.

    It counts rho of zero-concentrated differential privacy (Bun and Steinke 2016), in which sums of different noise
    add up, in whole trillionths, so that no sum is rounded away.

    Args:
        sums: Noisy sums of the run, as this site computes them from its own copy of the run file.

    Guarantees:
        Through crashes and restarts noise is drawn for no more sums than the budget pays for, and the charge of a sum
        is on the disk before its noise is drawn. An older directory that is put back is not detected.
    """

    def __init__(self, directory: Path, sums: NoisyRounds, config: SitePrivacyConfig) -> None:
        self._path = directory / "noisy-sums.json"
        self._sums, self._config = sums, config
        read_number(self._path, _BUDGET)

    def charge_noise(self, terms: SumTerms) -> NDArray[np.int64]:
        """Charge one sum, and return this site's share of its noise.

        Raises:
            AggregationError: The terms leave the noise no room, or count it for more than it is.
        """
        plan = self._sums.noisy_sum(len(terms.cohort))
        if terms.max_weight != plan.max_weight:
            raise AggregationError(
                SumRefusal.FOREIGN_TERMS,
                f"terms: max_weight is {terms.max_weight}, expected {plan.max_weight} beside noise",
            )
        with lock_file(self._path):
            spent = read_number(self._path, _BUDGET) or 0
            after = spent + math.ceil(self._sums.rho_per_sum * _PICO)
            if self._spent_epsilon(after) > self._config.epsilon:
                raise PrivacyBudgetError(
                    f"privacy: the sums of this directory have spent epsilon {self._spent_epsilon(spent):.3f} of "
                    f"{self._config.epsilon}, and another sum would exceed it; this site joins no further sum"
                )
            write_number(self._path, _BUDGET, after)
        return plan.draw_noise()

    @property
    def epsilon_spent(self) -> float:
        """Epsilon that the sums of this directory have spent so far."""
        return self._spent_epsilon(read_number(self._path, _BUDGET) or 0)

    def _spent_epsilon(self, spent: int) -> float:
        return epsilon_of_rho(spent / _PICO, self._config.delta) if spent else 0.0
