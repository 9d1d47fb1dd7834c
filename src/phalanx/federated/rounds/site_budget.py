"""The privacy budget of one site: it counts the sums that it brings noise to, and joins no more than it pays for.

The owner charges its own ledger before it asks. A site does not take its word for that: an owner that asks for the same
update again and again would average the noise away.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import AggregationError, PrivacyBudgetError
from phalanx.federated.config import SitePrivacyConfig
from phalanx.security.aggregate import SumRefusal, SumTerms
from phalanx.security.crypto import locked, read_number, write_number
from phalanx.security.privacy import NoisyRounds

_MOST_SUMS = 2**20


class SiteBudget:
    """The sums that one site has brought noise to, in a file of its own directory.

    Args:
        directory: The site's own.
        sums: Of the run, as this site computes them from its own copy of the run file.
        config: What they may spend.

    Raises:
        RollbackError: The file is damaged, or counts sums with other noise.

    Guarantees:
        Through crashes and restarts noise is drawn for no more sums than the budget pays for, and what a sum spends is
        on the disk before its noise is drawn. An older directory that is put back is not found out.
    """

    def __init__(self, directory: Path, sums: NoisyRounds, config: SitePrivacyConfig) -> None:
        self._path, self._key = directory / "noisy-sums.json", f"sums_with_noise_{sums.noise_multiplier:g}"
        self._sums, self._config = sums, config
        self._affordable = sums.affordable(config.epsilon, config.delta, _MOST_SUMS)
        read_number(self._path, self._key)

    def noise_for(self, terms: SumTerms) -> NDArray[np.int64]:
        """Charge one sum, and return this site's share of its noise.

        Raises:
            AggregationError: The terms leave the noise no room, or count it for more than it is.
            PrivacyBudgetError: The budget does not pay for another sum.
            RollbackError: The charge cannot be written down.
        """
        plan = self._sums.of(len(terms.cohort))
        if terms.max_weight != plan.max_weight:
            raise AggregationError(
                SumRefusal.FOREIGN_TERMS,
                f"terms: max_weight is {terms.max_weight}, expected {plan.max_weight} beside noise",
            )
        with locked(self._path):
            count = read_number(self._path, self._key) or 0
            if count >= self._affordable:
                raise PrivacyBudgetError(
                    f"privacy: {count} sums have spent epsilon {self._sums.epsilon(count, self._config.delta):.3f} of "
                    f"{self._config.epsilon}, and another one would spend more; this site takes part in no further one"
                )
            write_number(self._path, self._key, count + 1)
        return plan.draw()
