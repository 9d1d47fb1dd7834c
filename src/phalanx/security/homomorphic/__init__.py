"""Homomorphic sums: a server adds ciphertexts that it cannot read; only the holder of the secret key opens the sum.

For few sites that cannot talk to each other in a round. What the holder of the key can do, and why secure sums are to
be preferred where sites can talk: docs/privacy.md.
"""

from phalanx.security.homomorphic.key import MODULUS, KeyCommittee, SumKey, join_key, new_key, split_key
from phalanx.security.homomorphic.shares import join_sums, share_out
from phalanx.security.homomorphic.sums import (
    EncryptedSum,
    HomomorphicTerms,
    add_up,
    check_part,
    decrypt_sum,
    encrypt,
    encrypt_integers,
    rounded,
)

__all__ = [
    "MODULUS",
    "EncryptedSum",
    "HomomorphicTerms",
    "KeyCommittee",
    "SumKey",
    "add_up",
    "check_part",
    "decrypt_sum",
    "encrypt",
    "encrypt_integers",
    "join_key",
    "join_sums",
    "new_key",
    "rounded",
    "share_out",
    "split_key",
]
