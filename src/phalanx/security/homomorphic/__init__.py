"""Homomorphic sums: a server adds up what it cannot read, and a key that it has not opens the sum alone.

For few sites that cannot talk to each other in a round. What the holder of the key can do, and why secure sums are to
be preferred where sites can talk: docs/privacy.md.
"""

from phalanx.security.homomorphic.key import KeyCommittee, SumKey, join_key, new_key, split_key
from phalanx.security.homomorphic.sums import EncryptedSum, HomomorphicTerms, add_up, decrypt_sum, encrypt

__all__ = [
    "EncryptedSum",
    "HomomorphicTerms",
    "KeyCommittee",
    "SumKey",
    "add_up",
    "decrypt_sum",
    "encrypt",
    "join_key",
    "new_key",
    "split_key",
]
