"""The Merkle tree of RFC 6962 with SHA-256, over the lines of an audit log, and the proofs that readers check."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phalanx.errors import AuditLogError

HASH_BYTES = 32
EMPTY_ROOT = hashlib.sha256().digest()
MAX_PROOF_HASHES = 63


def hash_leaf(entry: bytes) -> bytes:
    """Return the digest of one entry, which no inner node can have."""
    return hashlib.sha256(b"\0" + entry).digest()


def hash_node(left: bytes, right: bytes) -> bytes:
    """Return the digest of an inner node."""
    return hashlib.sha256(b"\1" + left + right).digest()


@dataclass(frozen=True)
class TreeHead:
    """The size of a tree and its root, 32 bytes."""

    size: int
    root: bytes


class HashTree:
    """A tree that grows by leaves and gives the root, and proofs, of any of its sizes.

    Every complete subtree is kept, so an answer costs a number of hashes that is logarithmic in the size.
    """

    def __init__(self, leaf_hashes: Iterable[bytes] = ()) -> None:
        self.levels: list[list[bytes]] = [[]]
        for digest in leaf_hashes:
            self.append_hash(digest)

    def __len__(self) -> int:
        return len(self.levels[0])

    def append_hash(self, leaf_hash: bytes) -> None:
        """Add the digest of one more leaf."""
        level = 0
        self.levels[0].append(leaf_hash)
        while len(self.levels[level]) % 2 == 0:
            parent = hash_node(*self.levels[level][-2:])
            level += 1
            if level == len(self.levels):
                self.levels.append([])
            self.levels[level].append(parent)

    def head_at(self, size: int) -> TreeHead:
        """The head that the tree had when it was of this size, at most its present one."""
        return TreeHead(size, self._range_hash(0, size))

    def prove_inclusion(self, index: int, size: int) -> list[bytes]:
        """Return the hashes from the sibling of a leaf up to the child of the root, in the tree of this size."""
        self._check_range(index + 1, size)
        path: list[bytes] = []
        start, end = 0, size
        while end - start > 1:
            split = start + _left_size(end - start)
            if index < split:
                path.append(self._range_hash(split, end))
                end = split
            else:
                path.append(self._range_hash(start, split))
                start = split
        return path[::-1]

    def prove_consistency(self, old: int, size: int) -> list[bytes]:
        """Return the proof that the tree of size `old` is a prefix of that of `size`: RFC 6962, section 2.1.2."""
        self._check_range(old, size)
        path: list[bytes] = []
        start, end, is_whole = 0, size, True
        while old and old != end:
            split = start + _left_size(end - start)
            if old <= split:
                path.append(self._range_hash(split, end))
                end = split
            else:
                path.append(self._range_hash(start, split))
                start, is_whole = split, False
        if old and not is_whole:
            path.append(self._range_hash(start, end))
        return path[::-1]

    def _range_hash(self, start: int, end: int) -> bytes:
        self._check_range(start, end)
        if start == end:
            return EMPTY_ROOT
        level = (end - start).bit_length() - 1
        if end - start == 1 << level:
            return self.levels[level][start >> level]
        split = start + (1 << level)
        return hash_node(self._range_hash(start, split), self._range_hash(split, end))

    def _check_range(self, start: int, end: int) -> None:
        if not 0 <= start <= end <= len(self):
            raise AuditLogError(f"tree of {len(self)} leaves: has no range {start} to {end}")


def check_inclusion(entry_hash: bytes, index: int, head: TreeHead, path: Sequence[bytes]) -> None:
    """Return when a leaf is at this place of the tree with this head.

    Source: RFC 9162, section 2.1.3.2.
    """
    place, last, digest = index, head.size - 1, entry_hash
    is_good = 0 <= index < head.size
    for sibling in path if is_good else ():
        if last == 0:
            is_good = False
            break
        if place & 1 or place == last:
            digest = hash_node(sibling, digest)
            while place and not place & 1:
                place, last = place >> 1, last >> 1
        else:
            digest = hash_node(digest, sibling)
        place, last = place >> 1, last >> 1
    if not is_good or last != 0 or digest != head.root:
        raise AuditLogError(f"entry {index}: its path does not lead to the root of {head.size} entries")


def check_consistency(old: TreeHead, new: TreeHead, path: Sequence[bytes]) -> None:
    """Return when the tree of the old head is a prefix of that of the new one.

    Source: RFC 9162, section 2.1.4.2.
    """
    if not _is_consistent(old, new, list(path)):
        raise AuditLogError(f"the head of {new.size} entries does not continue the one of {old.size}")


def _is_consistent(old: TreeHead, new: TreeHead, path: list[bytes]) -> bool:
    if old.size in (0, new.size):
        expected = EMPTY_ROOT if old.size == 0 else new.root
        return not path and old.root == expected and (new.size > 0 or new.root == EMPTY_ROOT)
    if old.size > new.size:
        return False
    if old.size & (old.size - 1) == 0:
        path.insert(0, old.root)
    if not path:
        return False
    place, last = old.size - 1, new.size - 1
    while place & 1:
        place, last = place >> 1, last >> 1
    old_root = new_root = path[0]
    for sibling in path[1:]:
        if last == 0:
            return False
        if place & 1 or place == last:
            old_root, new_root = hash_node(sibling, old_root), hash_node(sibling, new_root)
            while place and not place & 1:
                place, last = place >> 1, last >> 1
        else:
            new_root = hash_node(new_root, sibling)
        place, last = place >> 1, last >> 1
    return last == 0 and old_root == old.root and new_root == new.root


def _left_size(size: int) -> int:
    return 1 << ((size - 1).bit_length() - 1)
