"""Homomorphic sums: a server adds ciphertexts that it cannot read; only the holder of the secret key opens the sum.

For few sites that cannot talk to each other in a round. What the holder of the key can do, and why secure sums are to
be preferred where sites can talk: docs/privacy.md.
"""

from phalanx.security.homomorphic.key import (
    MODULUS as MODULUS,
    SumKey as SumKey,
    new_key as new_key,
)
from phalanx.security.homomorphic.shares import join_sums as join_sums, share_out as share_out
from phalanx.security.homomorphic.sums import (
    HomomorphicTerms as HomomorphicTerms,
    sum_ciphertexts as sum_ciphertexts,
    check_part as check_part,
    decrypt_sum as decrypt_sum,
    encrypt_values as encrypt_values,
    encrypt_integers as encrypt_integers,
    round_values as round_values,
)
