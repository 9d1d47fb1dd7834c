"""A dataset being written: tokens into shards, documents into tables, and at the end one signed manifest."""

import hashlib
import os
import shutil
import struct
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from phalanx.closing import Closeable
from phalanx.data.shards.index import write_index
from phalanx.data.shards.leaves import FileRoot, LeafStore, LeafWriter
from phalanx.data.shards.manifest import (
    DATASET_FILE,
    BesideRecord,
    DatasetFacts,
    DatasetManifest,
    PartRecord,
    SourceRecord,
    part_directory,
    sign_dataset,
)
from phalanx.data.shards.records import DocumentEntry
from phalanx.data.shards.seal import WRAPPED_KEY_FILE, DatasetSeal, SealKey
from phalanx.errors import DataError, writing_cure
from phalanx.security.crypto import Identity

LEAF_BYTES = 64 * 1024
"""Measured: hashing is as fast as with 1 MiB, and the first read of a random sample waits for 1/16 of it."""
SHARD_TOKENS = 32 * 2**20
_INCOMPLETE = ".incomplete"


class DatasetWriter(Closeable):
    """A writer of one dataset; until `finish_dataset` returns there is none.

    Everything is written below ``.incomplete`` and moved at the end, the manifest last. A writer that was killed
    leaves nothing that could be taken for a dataset, and the next one in the same directory begins anew.

    Args:
        directory: Directory of the dataset; other files in it are left alone.
        dtype: Type of a token: ``"<u2"`` or ``"<u4"``.
        leaf_bytes: Content of one leaf: a power of two, 256 bytes to 1 MiB.
        seal: Wraps the data key of an encrypted dataset; None: not encrypted.
    """

    def __init__(
        self,
        directory: Path,
        dtype: Literal["<u2", "<u4"],
        shard_tokens: int = SHARD_TOKENS,
        leaf_bytes: int = LEAF_BYTES,
        seal: SealKey | None = None,
    ) -> None:
        if leaf_bytes & (leaf_bytes - 1) or not 2**8 <= leaf_bytes <= 2**20:
            raise DataError(f"leaf_bytes={leaf_bytes}: expected a power of two from 256 to {2**20}")
        if not 1 <= shard_tokens <= 2**40:
            raise DataError(f"shard_tokens={shard_tokens}: expected 1 to {2**40}")
        self.directory = directory
        self.dtype = np.dtype(dtype)
        self.shard_tokens = shard_tokens
        self._dtype_name: Literal["<u2", "<u4"] = dtype
        self._key = seal
        self._seal = None if seal is None else DatasetSeal.from_random()
        self._home = directory / _INCOMPLETE
        self._parts: dict[tuple[str, str], PartWriter] = {}
        self._begin_directory()
        self._store = LeafStore(self._home, leaf_bytes, self._seal)

    def part_writer(self, name: str, split: str) -> "PartWriter":
        """Return the writer of one split of a group; it is made at the first call.

        Raises:
            DataError: A name is not 1 to 63 of ``a-z 0-9 - _``, beginning with a letter or digit.
        """
        if (name, split) not in self._parts:
            self._parts[name, split] = PartWriter(self, name, split)
        return self._parts[name, split]

    def leaf_writer(self, file: str) -> LeafWriter:
        """Return a writer of one file of the dataset."""
        try:
            (self._home / file).parent.mkdir(parents=True, exist_ok=True)
            cipher = None if self._seal is None else self._seal.file_cipher(file)
            return LeafWriter(self._home / file, self._store.leaf_bytes, cipher)
        except OSError as exc:
            raise _not_written(self._home / file, exc) from exc

    def finish_dataset(self, facts: DatasetFacts, signer: Identity) -> DatasetManifest:
        """Write the index, sign the manifest and put all in place.

        Raises:
            DataError: A document's source or token is none that the facts name, there is no document, a further file
                is missing, or the directory cannot be written to.
        """
        try:
            manifest = self._make_manifest(facts)
            if self._seal is not None and self._key is not None:
                _write_synced(self._home / WRAPPED_KEY_FILE, self._seal.wrapped_key(self._key))
            _write_synced(self._home / DATASET_FILE, sign_dataset(manifest, signer))
            self._put_in_place()
        except OSError as exc:
            raise _not_written(self.directory, exc) from exc
        return manifest

    def close(self) -> None:
        for part in self._parts.values():
            part.close()
        shutil.rmtree(self._home, ignore_errors=True)

    def _begin_directory(self) -> None:
        if (self.directory / DATASET_FILE).exists():
            raise DataError(f"{self.directory}: already has a dataset; give another directory, or remove it")
        try:
            if (self.directory / "shards").exists():
                # a manifest that waits for its place: the end of an earlier writer was cut short
                if not (self._home / DATASET_FILE).exists():
                    raise DataError(
                        f"{self.directory}: has a directory shards that belongs to no dataset; give another directory"
                    )
                shutil.rmtree(self.directory / "shards")
            shutil.rmtree(self._home, ignore_errors=True)
            self._home.mkdir(parents=True)
        except OSError as exc:
            raise _not_written(self.directory, exc) from exc

    def _make_manifest(self, facts: DatasetFacts) -> DatasetManifest:
        names = sorted(self._parts)
        parts = tuple(self._parts[name].finish_part() for name in names)
        if not sum(part.documents for part in parts):
            raise DataError(f"{self.directory}: no document is left; a dataset needs at least one")
        largest = max(self._parts[name].max_token_id for name in names)
        if largest >= facts.tokenizer.vocab_size:
            raise DataError(
                f"{self.directory}: token {largest} is outside of the tokenizer's {facts.tokenizer.vocab_size}; "
                "give the tokenizer that made the tokens"
            )
        return DatasetManifest(
            dtype=self._dtype_name,
            shard_tokens=self.shard_tokens,
            leaf_bytes=self._store.leaf_bytes,
            documents=sum(part.documents for part in parts),
            tokens=sum(part.tokens for part in parts),
            tokenizer=facts.tokenizer,
            sources=self._source_records(facts),
            recipe=facts.recipe,
            tools=facts.tools,
            parents=facts.parents,
            files={name: _beside_record(self.directory, name) for name in facts.files},
            parts=parts,
            index=write_index(parts, self._store, self.leaf_writer),
            seal=None if self._seal is None else self._seal.seal_record(),
        )

    def _source_records(self, facts: DatasetFacts) -> tuple[SourceRecord, ...]:
        counts = [[0, 0] for _ in facts.sources]
        for part in self._parts.values():
            for source, (documents, tokens) in part.by_source.items():
                if not 0 <= source < len(counts):
                    raise DataError(f"{self.directory}: a document names source {source} of {len(counts)}")
                counts[source][0] += documents
                counts[source][1] += tokens
        return tuple(
            SourceRecord(**source.model_dump(), documents=documents, tokens=tokens)
            for source, (documents, tokens) in zip(facts.sources, counts, strict=True)
        )

    def _put_in_place(self) -> None:
        (self._home / "shards").rename(self.directory / "shards")
        if self._seal is not None:
            (self._home / WRAPPED_KEY_FILE).replace(self.directory / WRAPPED_KEY_FILE)
        (self._home / DATASET_FILE).replace(self.directory / DATASET_FILE)
        folder = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._home.rmdir()


class PartWriter:
    """A writer of one split of one group; its documents keep the order in which they are added."""

    def __init__(self, writer: DatasetWriter, group: str, split: str) -> None:
        empty = FileRoot(size_bytes=0, root="0" * 64)
        try:
            PartRecord(
                group=group, split=split, documents=0, tokens=0, shards=(), starts=empty, records=empty, entries=empty
            )
        except ValueError as exc:
            raise DataError(
                f"group {group!r:.80}, split {split!r:.80}: expected 1 to 63 of a-z, 0-9, hyphen and underscore"
            ) from exc
        self._writer = writer
        self._name = group, split
        self.dtype = writer.dtype
        self._directory = part_directory(group, split)
        self._starts, self._records, self._entries = (
            writer.leaf_writer(f"{self._directory}/{file}") for file in ("starts", "records", "entries")
        )
        self._shard: LeafWriter | None = None
        self._shards: list[FileRoot] = []
        self.documents = self.tokens = 0
        self.max_token_id = -1
        self.by_source: dict[int, list[int]] = {}

    def add_document(self, ids: NDArray[Any], entry: DocumentEntry) -> None:
        """Append one document.

        Args:
            ids: Its tokens, ``[tokens]`` of an integer type, the end-of-text token included.
        """
        content = entry.to_bytes()
        tokens = self._checked_tokens(ids, entry)
        try:
            self._starts.append_content(struct.pack("<Q", self.tokens))
            self._records.append_content(
                struct.pack(
                    "<32sIIQ", bytes.fromhex(entry.digest), entry.source, len(content), self._entries.size_bytes
                )
            )
            self._entries.append_content(content)
            self._write_tokens(tokens)
        except OSError as exc:
            raise _not_written(self._writer.directory, exc) from exc
        self.documents += 1
        self.tokens += len(tokens)
        counts = self.by_source.setdefault(entry.source, [0, 0])
        counts[0] += 1
        counts[1] += len(tokens)

    def finish_part(self) -> PartRecord:
        """Finish all files and return their records for the manifest."""
        self._starts.append_content(struct.pack("<Q", self.tokens))
        if self._shard is not None:
            self._shards.append(self._shard.finish_file())
        return PartRecord(
            group=self._name[0],
            split=self._name[1],
            documents=self.documents,
            tokens=self.tokens,
            shards=tuple(self._shards),
            starts=self._starts.finish_file(),
            records=self._records.finish_file(),
            entries=self._entries.finish_file(),
        )

    def close(self) -> None:
        """Give all files back."""
        for file in (self._starts, self._records, self._entries, self._shard):
            if file is not None:
                file.close()

    def _checked_tokens(self, ids: NDArray[Any], entry: DocumentEntry) -> NDArray[Any]:
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise DataError(
                f"document {entry.name[:80]!r}: tokens are {ids.dtype} {list(ids.shape)}, expected integers"
            )
        if len(ids):
            least, largest = int(ids.min()), int(ids.max())
            if least < 0 or largest > np.iinfo(self._writer.dtype).max:
                raise DataError(
                    f"document {entry.name[:80]!r}: tokens from {least} to {largest} do not fit "
                    f"{self._writer.dtype.str}"
                )
            self.max_token_id = max(self.max_token_id, largest)
        if not 0 <= entry.source < 2**16:
            raise DataError(f"document {entry.name[:80]!r}: source {entry.source}: expected 0 to {2**16 - 1}")
        return np.ascontiguousarray(ids, dtype=self._writer.dtype)

    def _write_tokens(self, tokens: NDArray[Any]) -> None:
        while len(tokens):
            if self._shard is None:
                self._shard = self._writer.leaf_writer(f"{self._directory}/tokens-{len(self._shards):05}")
            room = self._writer.shard_tokens - self._shard.size_bytes // self._writer.dtype.itemsize
            self._shard.append_content(tokens[:room].data)
            tokens = tokens[room:]
            # a full shard is finished when more comes, or at the end
            if room <= 0:
                self._shards.append(self._shard.finish_file())
                self._shard = None


def _beside_record(directory: Path, name: str) -> BesideRecord:
    path = directory / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise DataError(f"further file {name[:200]!r}: expected a path inside of the dataset")
    try:
        with path.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            return BesideRecord(size_bytes=stream.tell(), sha256=sha256)
    except OSError as exc:
        raise DataError(f"{path}: cannot be read ({exc.strerror}); write it before the dataset is finished") from exc


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _not_written(path: Path, exc: OSError) -> DataError:
    return DataError(f"{path}: cannot be written ({exc.strerror}); {writing_cure(exc)}")
