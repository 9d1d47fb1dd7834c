"""Files in leaves: written with the tree of their hashes beside them, read leaf by leaf, each checked once."""

import contextlib
import mmap
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from phalanx.config import StrictModel
from phalanx.data.shards.merkle import HASH_BYTES, abbreviate_digests, leaf_hash, tree_root
from phalanx.data.shards.seal import TAG_BYTES, DatasetSeal, LeafCipher
from phalanx.errors import DataError

TREE = ".tree"
"""What the name of a file's leaf hashes ends with."""

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]


class FileRoot(StrictModel):
    """What a manifest says of one file.

    Attributes:
        size_bytes: Size of its content, before encryption.
        root: Root of the tree over its leaves, as they lie on disk.
    """

    size_bytes: Count
    root: Digest

    def num_leaves(self, leaf_bytes: int) -> int:
        """Return how many leaves it has."""
        return -(-self.size_bytes // leaf_bytes)


class LeafWriter:
    """A writer of one file and its tree.

    Args:
        leaf_bytes: Content of every leaf but the last.
    """

    def __init__(self, path: Path, leaf_bytes: int, cipher: LeafCipher | None = None) -> None:
        self._path = path
        self._leaf_bytes = leaf_bytes
        self._cipher = cipher
        self._stream: BinaryIO = path.open("xb")
        self._buffer = bytearray()
        self._hashes: list[bytes] = []
        self.size_bytes = 0

    def append_content(self, data: bytes | memoryview) -> None:
        """Append content."""
        view = memoryview(data).cast("B")
        self.size_bytes += len(view)
        if self._buffer:
            missing = self._leaf_bytes - len(self._buffer)
            self._buffer += view[:missing]
            view = view[missing:]
            if len(self._buffer) < self._leaf_bytes:
                return
            self._put_leaf(bytes(self._buffer))
            self._buffer.clear()
        while len(view) >= self._leaf_bytes:
            self._put_leaf(view[: self._leaf_bytes])
            view = view[self._leaf_bytes :]
        self._buffer += view

    def finish_file(self) -> FileRoot:
        """Write the rest and the tree, force both to disk, and return their record for the manifest."""
        if self._buffer:
            self._put_leaf(bytes(self._buffer))
        _force_to_disk(self._stream)
        with self._path.with_name(self._path.name + TREE).open("xb") as tree:
            tree.write(b"".join(self._hashes))
            _force_to_disk(tree)
        return FileRoot(size_bytes=self.size_bytes, root=tree_root(self._hashes).hex())

    def close(self) -> None:
        """Give the file back without finishing it; on a full disk its last bytes are lost, and nobody reads it."""
        with contextlib.suppress(OSError):
            self._stream.close()

    def _put_leaf(self, leaf: bytes | memoryview) -> None:
        stored = leaf if self._cipher is None else self._cipher.seal_leaf(len(self._hashes), bytes(leaf))
        self._hashes.append(leaf_hash(stored))
        self._stream.write(stored)


def _force_to_disk(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
    stream.close()


FetchBytes = Callable[[str, int, int], bytes]
"""Returns bytes ``begin .. stop - 1`` of a file elsewhere, unverified; an error of the caller's own where it cannot."""
_BLOCK_BYTES = 2**20
"""Fetched at once, in whole leaves: a request costs more than the bytes of a leaf."""


class LeafStore:
    """What the open files of one dataset share: so many are mapped at a time, and so much of them is kept decrypted.

    Args:
        leaf_bytes: Size of every leaf but a file's last.
        max_files: Maps at a time; each holds a file descriptor.
        max_plain_bytes: Decrypted or fetched leaves that are kept for further reads.
        fetch: Where token files lie that are not in `home`; None where all do.
    """

    def __init__(
        self,
        home: Path,
        leaf_bytes: int,
        seal: DatasetSeal | None = None,
        max_files: int = 256,
        max_plain_bytes: int = 64 * 2**20,
        fetch: FetchBytes | None = None,
    ) -> None:
        self.home = home
        self.leaf_bytes = leaf_bytes
        self.seal = seal
        self.fetch = fetch
        self._max_files = max_files
        self._max_plain_bytes = max_plain_bytes
        self._mapped: deque[VerifiedFile] = deque()
        self._plain: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._plain_bytes = 0
        self._lock = threading.Lock()

    def note_map(self, file: "VerifiedFile") -> None:
        """Note a new map; the oldest one goes where there are too many."""
        with self._lock:
            self._mapped.append(file)
            oldest = self._mapped.popleft() if len(self._mapped) > self._max_files else None
        if oldest is not None:
            oldest.close_map()

    def find_leaf(self, file: str, index: int) -> bytes | None:
        """Return a decrypted or fetched leaf that is still kept."""
        with self._lock:
            if (leaf := self._plain.get((file, index))) is not None:
                self._plain.move_to_end((file, index))
            return leaf

    def keep_leaf(self, file: str, index: int, leaf: bytes) -> None:
        """Keep a decrypted or fetched leaf; the least recently read ones are dropped where there are too many."""
        with self._lock:
            self._plain_bytes += len(leaf) - len(self._plain.get((file, index), b""))
            self._plain[file, index] = leaf
            while self._plain_bytes > self._max_plain_bytes and len(self._plain) > 1:
                self._plain_bytes -= len(self._plain.popitem(last=False)[1])


class VerifiedFile:
    """A file of items in leaves, which are checked against the signed root, each at its first read in this process.

    Nothing is read when it is made. At the first read its tree is checked against the root; then every leaf that a
    read touches and that was not checked before is checked against the tree, so no byte is hashed twice. Leaves are
    read in place, through a memory map; encrypted ones are decrypted into memory that the dataset's files share.
    Leaves that are fetched from elsewhere are checked each time that they come: nothing says that a store gives the
    same bytes twice.

    Args:
        dtype: Type of the items; the file holds a whole number of them.
        num_ids: Upper bound of items that are token ids: each must be below it.
        fetch: Where the file lies; None: in the store's directory. Its tree is there in any case.
    """

    def __init__(
        self,
        store: LeafStore,
        file: str,
        record: FileRoot,
        dtype: np.dtype[Any],
        num_ids: int | None = None,
        fetch: FetchBytes | None = None,
    ) -> None:
        self.file = file
        self.num_items = record.size_bytes // dtype.itemsize
        self._store = store
        self._record = record
        self._dtype = dtype
        self._num_ids = num_ids
        self._fetch = fetch
        self._shift = store.leaf_bytes.bit_length() - 1
        self._cipher = None if store.seal is None else store.seal.file_cipher(file)
        self._map: mmap.mmap | None = None
        self._items: NDArray[Any] = np.empty(0, dtype)
        self._hashes = b""
        self._checked = bytearray()
        self._identity: tuple[int, ...] = ()
        self._lock = threading.RLock()

    def read_items(self, start: int, stop: int) -> NDArray[Any]:
        """Return items ``start .. stop - 1``, checked; read-only."""
        if not 0 <= start <= stop <= self.num_items:
            raise IndexError(f"{self.file}: items {start} to {stop} of {self.num_items}")
        if start == stop:
            return self._items[:0]
        if self._fetch is not None:
            return self._read_kept(start, stop)
        first, last = self._leaf_range(start, stop)
        # the map is taken first: another thread may unmap in between, and the map lives as long as its items
        items, is_partial = self._items, self._map is not None
        if not is_partial or self._checked.find(0, first, last + 1) >= 0:
            items = self._check_leaves(first, last)
        return items[start:stop] if self._cipher is None else self._read_kept(start, stop)

    def read_all(self) -> NDArray[Any]:
        """Return every item, checked."""
        return self.read_items(0, self.num_items)

    def close_map(self) -> None:
        """Give the map back; views of it stay valid, and checked leaves stay checked."""
        with self._lock:
            self._map, self._items = None, np.empty(0, self._dtype)

    def _leaf_range(self, start: int, stop: int) -> tuple[int, int]:
        size = self._dtype.itemsize
        return start * size >> self._shift, (stop * size - 1) >> self._shift

    def _check_leaves(self, first: int, last: int) -> NDArray[Any]:
        with self._lock:
            stored = self._open_map()
            for leaf in range(first, last + 1):
                if not self._checked[leaf]:
                    self._check_leaf(leaf, stored)
                    self._checked[leaf] = 1
            return self._items

    def _check_leaf(self, leaf: int, stored: mmap.mmap) -> None:
        begin, stop = self._leaf_place(leaf)
        with memoryview(stored) as mapped, mapped[begin:stop] as data:
            self._compare_hash(leaf, leaf_hash(data))
        if self._num_ids is not None and self._cipher is None:
            self._check_ids(leaf, np.frombuffer(stored, self._dtype, (stop - begin) // self._dtype.itemsize, begin))

    def _compare_hash(self, leaf: int, digest: bytes) -> None:
        begin, stop = self._leaf_place(leaf)
        expected = self._hashes[leaf * HASH_BYTES : (leaf + 1) * HASH_BYTES]
        if digest != expected:
            has, expects = abbreviate_digests(digest.hex(), expected.hex())
            raise _altered_error(
                f"{self._store.home / self.file}: leaf {leaf} (bytes {begin} to {stop - 1}) has SHA-256 {has}, "
                f"expected {expects}"
            )

    def _check_ids(self, leaf: int, ids: NDArray[Any]) -> None:
        if self._num_ids is not None and int(ids.max()) >= self._num_ids:
            raise DataError(
                f"{self._store.home / self.file}: leaf {leaf} has token {int(ids.max())}, but the vocabulary has "
                f"{self._num_ids}; build the dataset again with its own tokenizer"
            ).with_facts(code="PHX-I027")

    def _leaf_place(self, leaf: int) -> tuple[int, int]:
        """Return where a leaf lies on disk."""
        stride = self._store.leaf_bytes + (0 if self._cipher is None else TAG_BYTES)
        return leaf * stride, min((leaf + 1) * stride, self._stored_bytes)

    @property
    def _stored_bytes(self) -> int:
        tags = 0 if self._cipher is None else TAG_BYTES * self._record.num_leaves(self._store.leaf_bytes)
        return self._record.size_bytes + tags

    def _open_map(self) -> mmap.mmap:
        """Map the file; its tree is read at the first time."""
        if self._map is not None:
            return self._map
        path = self._store.home / self.file
        try:
            with path.open("rb") as stream:
                status = os.fstat(stream.fileno())
                if status.st_size != self._stored_bytes:
                    raise _altered_error(f"{path}: has {status.st_size} bytes, expected {self._stored_bytes}")
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as exc:
            raise _altered_error(f"{path}: cannot be read ({exc.strerror})") from exc
        if not self._hashes:
            self._hashes = self._read_tree(path)
        identity = (status.st_dev, status.st_ino, status.st_mtime_ns)
        if identity != self._identity:
            # another file, or one that was written to, since it was mapped last
            self._checked, self._identity = bytearray(len(self._hashes) // HASH_BYTES), identity
        self._map = mapped
        if self._cipher is None:
            self._items = np.frombuffer(mapped, self._dtype)
        self._store.note_map(self)
        return mapped

    def _read_tree(self, path: Path) -> bytes:
        path = path.with_name(path.name + TREE)
        size = HASH_BYTES * self._record.num_leaves(self._store.leaf_bytes)
        try:
            with path.open("rb") as stream:
                hashes = stream.read(size + 1)
        except OSError as exc:
            raise _altered_error(f"{path}: cannot be read ({exc.strerror})") from exc
        if len(hashes) != size:
            raise _altered_error(f"{path}: has {'more' if len(hashes) > size else len(hashes)} bytes, expected {size}")
        root = tree_root([hashes[start : start + HASH_BYTES] for start in range(0, size, HASH_BYTES)]).hex()
        if root != self._record.root:
            has, expects = abbreviate_digests(root, self._record.root)
            raise _altered_error(f"{path}: has root {has}, but the manifest has {expects}")
        return hashes

    def _read_kept(self, start: int, stop: int) -> NDArray[Any]:
        size, (first, last) = self._dtype.itemsize, self._leaf_range(start, stop)
        begin = start * size - (first << self._shift)
        if first == last:
            return np.frombuffer(self._plain_leaf(first), self._dtype, stop - start, begin)
        content = b"".join(self._plain_leaf(leaf) for leaf in range(first, last + 1))
        return np.frombuffer(content, self._dtype, stop - start, begin)

    def _plain_leaf(self, leaf: int) -> bytes:
        if (leaf_bytes := self._store.find_leaf(self.file, leaf)) is not None:
            return leaf_bytes
        if self._fetch is not None:
            return self._fetch_block(leaf, self._fetch)
        begin, stop = self._leaf_place(leaf)
        with self._lock:
            # its hash was right once; that it is still the same, its tag says
            sealed = self._open_map()[begin:stop]
        return self._keep_plain(leaf, sealed)

    def _fetch_block(self, leaf: int, fetch: FetchBytes) -> bytes:
        """Fetch the block of a leaf, check every leaf of it, keep them, and return that one."""
        with self._lock:
            if (leaf_bytes := self._store.find_leaf(self.file, leaf)) is not None:
                # another thread fetched it meanwhile
                return leaf_bytes
            if not self._hashes:
                self._hashes = self._read_tree(self._store.home / self.file)
            per_block = max(1, _BLOCK_BYTES // self._store.leaf_bytes)
            first = leaf - leaf % per_block
            leaves = range(first, min(first + per_block, len(self._hashes) // HASH_BYTES))
            begin, stop = self._leaf_place(leaves[0])[0], self._leaf_place(leaves[-1])[1]
            block = fetch(self.file, begin, stop)
            if len(block) != stop - begin:
                raise _altered_error(
                    f"{self._store.home / self.file}: {len(block)} bytes came for bytes {begin} to {stop - 1}"
                )
            for number in leaves:
                at, end = self._leaf_place(number)
                sealed = block[at - begin : end - begin]
                self._compare_hash(number, leaf_hash(sealed))
                plain = self._keep_plain(number, sealed)
                if number == leaf:
                    leaf_bytes = plain
        # a cache that is smaller than a block may have dropped it again
        return leaf_bytes or b""

    def _keep_plain(self, leaf: int, sealed: bytes) -> bytes:
        plain = self._cipher.open_leaf(leaf, sealed) if self._cipher is not None else sealed
        if self._num_ids is not None:
            self._check_ids(leaf, np.frombuffer(plain, self._dtype))
        self._store.keep_leaf(self.file, leaf, plain)
        return plain


def _altered_error(what: str) -> DataError:
    return DataError(
        f"{what}: altered or damaged; restore the file from a copy, or build the dataset again"
    ).with_facts(code="PHX-I027")
