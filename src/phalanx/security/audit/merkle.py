"""One digest over many records, as in RFC 6962: what is in the tree, in which order, and nothing else."""

from collections.abc import Sequence

from phalanx.security.crypto import digest_hex

_LEAF, _NODE = b"\x00", b"\x01"


def merkle_root(leaves: Sequence[bytes]) -> str:
    """Return the root, in 64 lowercase hex characters, of the tree over these leaves in this order.

    A leaf's digest is BLAKE3 over ``00`` and its bytes, a node's over ``01`` and its two children, so no leaf can
    pass for a node. A tree of n > 1 leaves has the first k in its left part, k being the largest power of two
    below n. The tree of no leaves is the digest of nothing.

    Source: RFC 6962, section 2.1, with BLAKE3 in the place of SHA-256.
    """
    return _root([bytes.fromhex(digest_hex(_LEAF, leaf)) for leaf in leaves]).hex()


def _root(digests: Sequence[bytes]) -> bytes:
    if not digests:
        return bytes.fromhex(digest_hex())
    if len(digests) == 1:
        return digests[0]
    left = 1 << ((len(digests) - 1).bit_length() - 1)
    return bytes.fromhex(digest_hex(_NODE, _root(digests[:left]), _root(digests[left:])))
