"""Differential privacy: what steps spend of a budget, and noise that is not to be foreseen. Loads no torch.

PrivacyConfig            the section [privacy] of a run file
PoissonGaussian          the mechanism of a run's steps, and what so many of them spend
CappedPoissonGaussian    the same where a step has room for so many rows
BudgetLedger             the charges of a run, a line of its audit log each
poisson_sample           the rows of one step, by a secret key
sampling_key             that key, in a file of its own
gaussian_noise           real noise from a cryptographic stream
NoiseSecret              noise that auditors compute again, by keys of a stage and an epoch
discrete_gaussian        integer noise of the exact distribution
NoisySum                 the noise that clients of a secure sum bring
NoisyRounds              the noisy sums of a run, and what so many of them spend
epsilon_of_rho           what zero-concentrated differential privacy amounts to

The guarantee, its adversary and its limits: docs/privacy.md.
"""

from phalanx.security.privacy.accountant import (
    PoissonGaussian as PoissonGaussian,
    check_rate as check_rate,
    min_noise_multiplier as min_noise_multiplier,
)
from phalanx.security.privacy.capped import (
    CappedPoissonGaussian as CappedPoissonGaussian,
    max_mean_rows as max_mean_rows,
)
from phalanx.security.privacy.config import PrivacyConfig as PrivacyConfig
from phalanx.security.privacy.derived import (
    NoiseSecret as NoiseSecret,
    noise_commitment as noise_commitment,
    noise_seed as noise_seed,
    noise_stream as noise_stream,
)
from phalanx.security.privacy.distributed import (
    NoisyRounds as NoisyRounds,
    NoisySum as NoisySum,
    epsilon_of_rho as epsilon_of_rho,
)
from phalanx.security.privacy.ledger import BudgetLedger as BudgetLedger, PastCharges as PastCharges
from phalanx.security.privacy.noise import (
    SEED_BYTES as SEED_BYTES,
    SecureStream as SecureStream,
    discrete_gaussian as discrete_gaussian,
    gaussian_noise as gaussian_noise,
    poisson_sample as poisson_sample,
    sampling_key as sampling_key,
)
