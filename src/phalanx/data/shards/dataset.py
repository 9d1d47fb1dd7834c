"""A dataset that is opened to be read: its manifest, its tokens and its documents, all verified."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.access_gate import note_read
from phalanx.data.shards.index import NODES_FILE, TABLE_FILE, make_index
from phalanx.data.shards.leaves import FetchBytes, LeafStore, VerifiedFile
from phalanx.data.shards.manifest import (
    DATASET_FILE,
    MAX_MANIFEST_BYTES,
    DatasetManifest,
    PartRecord,
    SignedDataset,
    dataset_digest,
    verify_dataset,
)
from phalanx.data.shards.merkle import abbreviate_digests, tree_root
from phalanx.data.shards.records import DOCUMENT, INDEX, MAX_ENTRY_BYTES, START, DocumentEntry
from phalanx.data.shards.seal import WRAPPED_KEY_FILE, DatasetSeal, SealKey, SealRecord
from phalanx.errors import DataError, DiskError
from phalanx.security.crypto import replace_file

_MAX_KEY_BYTES = 64 * 1024
_NODE = np.dtype("V32")


class TokenStream:
    """The tokens of one split of one group, as one array over all shards; a leaf is checked when first read."""

    def __init__(self, part: PartRecord, store: LeafStore, manifest: DatasetManifest) -> None:
        self.dtype = np.dtype(manifest.dtype)
        self._num_tokens = part.tokens
        self._shard_tokens = manifest.shard_tokens
        self._shards = [
            VerifiedFile(
                store,
                f"{part.shard_directory}/tokens-{number:05}",
                shard,
                self.dtype,
                manifest.tokenizer.vocab_size,
                store.fetch,
            )
            for number, shard in enumerate(part.shards)
        ]

    def __len__(self) -> int:
        return self._num_tokens

    def __getitem__(self, place: slice) -> NDArray[np.unsignedinteger]:
        """Return tokens as `read` does; only slices of step 1."""
        start, stop, step = place.indices(self._num_tokens)
        if step != 1:
            raise IndexError(f"tokens have step {step}, expected 1")
        return self.read_tokens(start, max(start, stop))

    def read_tokens(self, start: int, stop: int) -> NDArray[np.unsignedinteger]:
        """Return tokens ``start .. stop - 1``, read-only; a view of the file where they are in one plain shard.

        Raises:
            DataError: A leaf is not the signed one; the message names shard and leaf.
        """
        if not 0 <= start <= stop <= self._num_tokens:
            raise IndexError(f"tokens {start} to {stop} of {self._num_tokens}")
        shard, offset = divmod(start, self._shard_tokens)
        last_offset = offset + stop - start
        if last_offset <= self._shard_tokens:
            return self._shards[shard].read_items(offset, last_offset) if stop > start else np.empty(0, self.dtype)
        pieces = []
        while start < stop:
            shard, offset = divmod(start, self._shard_tokens)
            last_offset = min(self._shard_tokens, offset + stop - start)
            pieces.append(self._shards[shard].read_items(offset, last_offset))
            start += last_offset - offset
        joined = np.concatenate(pieces)
        joined.flags.writeable = False
        return joined


@dataclass(frozen=True)
class TokenSource:
    """Where the token files of a dataset lie that are not in its directory.

    Attributes:
        fetch: Brings a range of bytes of one of them.
        cache_bytes: Tokens that are kept in memory.
    """

    fetch: FetchBytes
    cache_bytes: int


class Dataset:
    """A dataset with a verified manifest; nothing else is read until it is asked for.

    Attributes:
        digest: SHA-256 in hex of the manifest, and so of every token.
        signer_was_named: Whether the caller said which key that must be. Otherwise nothing vouches for the signer, and
            what shows the dataset to a person says so; `trust` is a sentence for that.
        statement: The signer's statement about the index alone, and its signature.
    """

    def __init__(
        self,
        directory: Path,
        signed: SignedDataset,
        seal: DatasetSeal | None,
        *,
        named: bool,
        stream: TokenSource | None = None,
    ) -> None:
        self.directory = directory
        self.manifest = manifest = signed.manifest
        self.digest = signed.statement.dataset
        self.signer = signed.signer
        self.statement, self.statement_signature = signed.statement, signed.statement_signature
        self.signer_was_named = named
        self.groups: dict[str, tuple[str, ...]] = {}
        for part in manifest.parts:
            self.groups[part.group] = (*self.groups.get(part.group, ()), part.split)
        self._store = LeafStore(directory, manifest.leaf_bytes, seal)
        if stream is not None:
            self._store = LeafStore(
                directory, manifest.leaf_bytes, seal, max_plain_bytes=stream.cache_bytes, fetch=stream.fetch
            )
        self._tokens: dict[tuple[str, str], TokenStream] = {}
        self._tables: dict[str, VerifiedFile] = {}

    @property
    def trust_statement(self) -> str:
        """What is known of the signer, in one sentence."""
        if self.signer_was_named:
            return f"signed with the expected key {self.signer}"
        return f"signed with key {self.signer}, not verified: give it as signer after you have checked its owner"

    def tokens(self, group: str, split: str) -> TokenStream:
        """Return the tokens of one split of a group."""
        if (group, split) not in self._tokens:
            self._tokens[group, split] = TokenStream(self.part_record(group, split), self._store, self.manifest)
        return self._tokens[group, split]

    def document_starts(self, group: str, split: str) -> NDArray[np.uint64]:
        """Return where every document begins, and at the end the number of tokens: ``[documents + 1]``, rising."""
        part = self.part_record(group, split)
        starts = self._open_table(f"{part.shard_directory}/starts", part.starts, START).read_all()
        if starts[0] != 0 or starts[-1] != part.tokens or (starts[1:] < starts[:-1]).any():
            raise DataError(
                f"{self.directory / part.shard_directory}/starts: does not rise from 0 to {part.tokens}; build the "
                "dataset again"
            ).with_facts(code="PHX-I027")
        return starts

    def source_tokens(self, group: str, split: str) -> list[int]:
        """Return how many tokens of one split of a group each source of the dataset has."""
        part, num_sources = self.part_record(group, split), len(self.manifest.sources)
        records = self._open_table(f"{part.shard_directory}/records", part.records, DOCUMENT).read_all()
        sizes = np.diff(self.document_starts(group, split)).astype(np.int64)
        if len(records) and int(records["source"].max()) >= num_sources:
            raise DataError(
                f"{self.directory / part.shard_directory}/records: a document is of source {records['source'].max()}, "
                f"but there are {num_sources}; build the dataset again"
            ).with_facts(code="PHX-I027")
        totals = np.zeros(num_sources, dtype=np.int64)
        np.add.at(totals, records["source"], sizes)
        return [int(total) for total in totals]

    def document_entry(self, group: str, split: str, number: int) -> DocumentEntry:
        """Return the entry of one document.

        Raises:
            IndexError: The part has no document of this number.
        """
        part = self.part_record(group, split)
        record = self._open_table(f"{part.shard_directory}/records", part.records, DOCUMENT).read_items(
            number, number + 1
        )[0]
        return self._read_entry(part, record)

    def document_entries(self, group: str, split: str) -> Iterator[DocumentEntry]:
        """Yield the entry of every document, in order."""
        part = self.part_record(group, split)
        for record in self._open_table(f"{part.shard_directory}/records", part.records, DOCUMENT).read_all():
            yield self._read_entry(part, record)

    def document_digests(self, split: str) -> NDArray[np.void]:
        """Return the digests of all documents of a split, sorted and without repeats: ``[documents]`` of 32 bytes."""
        table = self.index_table().read_all()
        parts = [number for number, part in enumerate(self.manifest.parts) if part.split == split]
        digests = np.ascontiguousarray(table["digest"][np.isin(table["part"], parts)])
        return np.unique(digests.view("V32").reshape(-1))

    def part_record(self, group: str, split: str) -> PartRecord:
        """Return the manifest's record of one split of a group."""
        for part in self.manifest.parts:
            if (part.group, part.split) == (group, split):
                return part
        part_names = ", ".join(f"{part.group}.{part.split}" for part in self.manifest.parts[:20])
        raise DataError(f"{self.directory}: has no {group}.{split}; it has {part_names}")

    def index_table(self) -> VerifiedFile:
        """Return the records of all documents in the order of their digests, of type `INDEX`."""
        return self._open_table(TABLE_FILE, self.manifest.index.table, INDEX)

    def index_nodes(self) -> VerifiedFile:
        """Return the nodes of the index's tree that are kept, 32 bytes each."""
        return self._open_table(NODES_FILE, self.manifest.index.nodes, _NODE)

    def verify(self) -> Iterator[str]:
        """Check every byte that the signature covers; yield the path of each file after it was checked."""
        for part in self.manifest.parts:
            stream = self.tokens(part.group, part.split)
            for start in range(0, len(stream), self.manifest.shard_tokens):
                stream.read_tokens(start, min(len(stream), start + self.manifest.shard_tokens))
                yield f"{part.shard_directory}/tokens-{start // self.manifest.shard_tokens:05}"
            self.document_starts(part.group, part.split)
            for _ in self.document_entries(part.group, part.split):
                pass
            yield from (f"{part.shard_directory}/{name}" for name in ("starts", "records", "entries"))
        content, nodes = make_index(self.manifest.parts, self._store)
        for table, expected in ((self.index_table(), content), (self.index_nodes(), b"".join(nodes))):
            if table.read_all().tobytes() != expected or tree_root(nodes).hex() != self.manifest.index.root:
                raise DataError(
                    f"{self.directory / table.file}: does not match the documents, although it is signed: a proof "
                    "of this signer may be wrong"
                ).with_facts(code="PHX-I027")
            yield table.file
        for name in self.manifest.files:
            self.check_beside(name)
            yield name

    def check_beside(self, name: str) -> None:
        """Check that a further file of the directory is the signed one."""
        path, record = self.directory / name, self.manifest.files.get(name)
        if record is None:
            raise DataError(f"{path}: is not among the signed files").with_facts(code="PHX-I027")
        size_bytes, sha256 = record.size_bytes, record.sha256
        try:
            with path.open("rb") as stream:
                digest, size = hashlib.file_digest(stream, "sha256").hexdigest(), stream.tell()
        except OSError as exc:
            raise DataError(f"{path}: cannot be read ({exc.strerror}); restore it from a copy") from exc
        if (size, digest) != (size_bytes, sha256):
            has, expects = abbreviate_digests(digest, sha256)
            raise DataError(
                f"{path}: has SHA-256 {has}, expected {expects}: altered; restore it from a copy"
            ).with_facts(code="PHX-I027")

    def _open_table(self, file: str, record: Any, dtype: np.dtype[Any]) -> VerifiedFile:
        if file not in self._tables:
            self._tables[file] = VerifiedFile(self._store, file, record, dtype)
        return self._tables[file]

    def _read_entry(self, part: PartRecord, record: Any) -> DocumentEntry:
        start, size, source = int(record["entry_start"]), int(record["entry_bytes"]), int(record["source"])
        file = f"{part.shard_directory}/entries"
        if size > MAX_ENTRY_BYTES or start + size > part.entries.size_bytes or source >= len(self.manifest.sources):
            raise DataError(f"{self.directory / file}: an entry is out of range; build the dataset again")
        content = self._open_table(file, part.entries, np.dtype("u1")).read_items(start, start + size).tobytes()
        return DocumentEntry.from_bytes(content, record["digest"].tobytes().hex(), source, str(self.directory / file))


def open_dataset(
    directory: Path, signer: str | None = None, key: SealKey | None = None, stream: TokenSource | None = None
) -> Dataset:
    """Open a dataset: its manifest is verified, and every byte of it later, before it is used.

    Args:
        signer: Fingerprint of the key that must have signed it. None: any key; the caller tells which, by `trust`.
        stream: Where its token files are; None: in the directory.

    Raises:
        DataError: There is no dataset, it is unsigned, altered, or signed with another key; or it is encrypted and the
            key is missing or another one.
    """
    signed = _read_signed(directory, signer)
    record = signed.manifest.seal
    if record is not None and key is None:
        raise DataError(f"{directory}: is encrypted; give the file of its key")
    seal = None if record is None or key is None else _open_seal(directory, record, key)
    note_read("dataset", dataset_digest(signed.manifest), directory, is_sealed=seal is not None)
    return Dataset(directory, signed, seal, named=signer is not None, stream=stream)


def rewrap_data_key(directory: Path, old: SealKey, new: SealKey) -> str:
    """Wrap the data key of a dataset with another key, and return the name of that one; nothing else changes."""
    record = _read_signed(directory, None).manifest.seal
    if record is None:
        raise DataError(f"{directory}: is not encrypted and has no key to change")
    content = _open_seal(directory, record, old).wrapped_key(new)
    try:
        # whole, old or new, whatever happens
        replace_file(directory / WRAPPED_KEY_FILE, content, 0o666)
    except DiskError as exc:
        raise DataError(f"{exc}; the old key still opens it") from exc
    return new.name


def manifest_bytes(directory: Path) -> bytes:
    """Return the bytes of a dataset's manifest, unverified."""
    return _read_limited(directory / DATASET_FILE, MAX_MANIFEST_BYTES)


def _read_signed(directory: Path, signer: str | None) -> SignedDataset:
    return verify_dataset(manifest_bytes(directory), directory / DATASET_FILE, signer)


def _open_seal(directory: Path, record: SealRecord, key: SealKey) -> DatasetSeal:
    path = directory / WRAPPED_KEY_FILE
    return DatasetSeal.from_wrapped(record, key, _read_limited(path, _MAX_KEY_BYTES), str(path))


def _read_limited(path: Path, max_bytes: int) -> bytes:
    try:
        with path.open("rb") as stream:
            content = stream.read(max_bytes + 1)
    except OSError as exc:
        raise DataError(
            f"{path}: cannot be read ({exc.strerror}); give the directory that `phalanx data build` made"
        ) from exc
    if len(content) > max_bytes:
        raise DataError(f"{path}: exceeds the limit of {max_bytes} bytes; restore it from a copy")
    return content
