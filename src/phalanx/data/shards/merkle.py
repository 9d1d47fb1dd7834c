"""Merkle trees over SHA-256 as in Certificate Transparency: roots, and paths that prove one leaf."""

import hashlib
from collections.abc import Sequence

HASH_BYTES = 32
_SHOWN_DIGITS = 16


def leaf_hash(data: bytes | memoryview) -> bytes:
    """Return the hash of a leaf; no leaf hashes like an inner node, whatever is in it.

    Args:
        data: Read in place; a memoryview must be contiguous.

    Source: RFC 6962, section 2.1.
    """
    hasher = hashlib.sha256(b"\0")
    hasher.update(data)
    return hasher.digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return the hash of an inner node."""
    return hashlib.sha256(b"\1" + left + right).digest()


def tree_root(leaves: Sequence[bytes]) -> bytes:
    """Return the root over hashes of leaves, or over the roots of equal, whole subtrees; of none, that of RFC 6962."""
    level = list(leaves)
    if not level:
        return hashlib.sha256().digest()
    while len(level) > 1:
        level = _parent_level(level)
    return level[0]


def audit_path(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """Return the siblings on the way from one leaf to the root, the lowest first."""
    if not 0 <= index < len(leaves):
        raise IndexError(f"leaf {index} of {len(leaves)}")
    level, path = list(leaves), []
    while len(level) > 1:
        sibling = index ^ 1
        # the last node of an odd level has no sibling: it is its own parent
        if sibling < len(level):
            path.append(level[sibling])
        level, index = _parent_level(level), index >> 1
    return path


def root_from_path(leaf: bytes, index: int, size: int, path: Sequence[bytes]) -> bytes:
    """Return the root that a path leads to.

    Args:
        size: Number of leaves of the tree.
        path: Result of `audit_path`.

    Source: RFC 9162, section 2.1.3.2.
    """
    if not 0 <= index < size:
        raise ValueError(f"leaf {index} is outside of a tree of {size}")
    node, last, rest = leaf, size - 1, list(path)
    while last:
        if index & 1 or index < last:
            if not rest:
                raise ValueError("the path is too short")
            sibling = rest.pop(0)
            node = node_hash(sibling, node) if index & 1 else node_hash(node, sibling)
        index, last = index >> 1, last >> 1
    if rest:
        raise ValueError("the path is too long")
    return node


def _parent_level(level: list[bytes]) -> list[bytes]:
    parents = [node_hash(level[index], level[index + 1]) for index in range(0, len(level) - 1, 2)]
    return parents if len(level) % 2 == 0 else [*parents, level[-1]]


def abbreviate_digests(found: str, expected: str) -> tuple[str, str]:
    """Shorten two different hex digests for a message, so that their difference shows.

    A tree of one leaf stands on disk as its own root: whoever alters one byte of it changes two digits anywhere in the
    digest, and the first digits of both may be equal.
    """
    first = next((place for place, pair in enumerate(zip(found, expected, strict=False)) if len(set(pair)) > 1), 0)
    length = max(_SHOWN_DIGITS, first + _SHOWN_DIGITS // 2)
    return f"{found[:length]}...", f"{expected[:length]}..."
