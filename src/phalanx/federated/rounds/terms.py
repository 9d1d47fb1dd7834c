"""The facts of a run that the owner and each site have from their own copies of the run file."""

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.federated.config import FederatedConfig
from phalanx.security.crypto import Peer
from phalanx.security.privacy import NoisyRounds


@dataclass(frozen=True)
class RunTerms:
    """The facts of a run; no party takes another one's word for them.

    Attributes:
        run: Name of the run.
        digest: Of the run file.
        config: The section.
        seed: Of the draw of cohorts.
        owner: Asks for rounds.
        roster: All sites by name, certified by the run's authority.
        rounds: How many the run is to have.
    """

    run: str
    digest: str
    config: FederatedConfig
    seed: int
    owner: Peer
    roster: Mapping[str, Peer]
    rounds: int

    def noisy_rounds(self, length: int) -> NoisyRounds | None:
        """Return the noisy sums of the run, of so many values; None where sites bring no noise.

        Raises:
            ConfigError: No noise keeps the run's rounds within its budget.
        """
        wanted, sizes = self.config.privacy, self.config.cohort_sizes
        if wanted is None:
            return None
        sums = NoisyRounds(sizes[0], sizes[-1], self.config.min_cohort, length, wanted.noise_multiplier or 1.0)
        if wanted.noise_multiplier is not None:
            return sums
        return sums.enough_for(self.rounds, wanted.epsilon, wanted.delta)
