"""Datasets in an object store, through fsspec: whole or absent, and downloads are checked like a stranger's."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from phalanx.data.publish import publish_directory
from phalanx.data.shards.dataset import manifest_bytes
from phalanx.data.shards.leaves import TREE
from phalanx.data.shards.manifest import (
    DATASET_FILE,
    MAX_MANIFEST_BYTES,
    DatasetManifest,
    SignedDataset,
    verify_dataset,
)
from phalanx.data.shards.merkle import HASH_BYTES
from phalanx.data.shards.seal import TAG_BYTES, WRAPPED_KEY_FILE
from phalanx.errors import DataError
from phalanx.object_stores import client_errors, open_store, reason_of

_UNFINISHED = "copy-in-progress"
"""Beside a dataset that is being copied: the digest of what goes there."""
_TOKENIZER = "tokenizer.json"
"""Beside any dataset that is trained on: where it is none of the signed files, its digest is in the manifest."""
_PIECE_BYTES, _MAX_KEY_BYTES, _MAX_TOKENIZER_BYTES = 2**20, 64 * 1024, 2**28


class StoredDataset:
    """The place of one dataset in an object store.

    Credentials and endpoints come from where the store's own client looks for them, never from a file of ours.

    Args:
        address: Such as ``s3://bucket/folder``.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        try:
            self._files, self._root = open_store(self.address)
        except (ImportError, ValueError) as exc:
            # an unknown protocol is a ValueError
            raise DataError(f"{address}: {exc}; install phalanx-train[s3], or the client that fsspec names").with_facts(
                file=address, do="install phalanx-train[s3]"
            ) from exc

    def upload_dataset(self, directory: Path, signer: str | None = None) -> SignedDataset:
        """Copy a dataset there, its manifest last; a copy that was cut off goes on.

        Args:
            directory: Directory of the dataset; encrypted or not, no key is needed.
            signer: Fingerprint of the key that must have signed it; None: any.
        """
        content = manifest_bytes(directory)
        signed, manifest = verify_dataset(content, directory / DATASET_FILE, signer), f"{self._root}/{DATASET_FILE}"
        names = [*_files_of(signed.manifest), *([_TOKENIZER] if (directory / _TOKENIZER).exists() else [])]
        sizes = {name: _file_size(directory / name) for name in names}
        name_of = signed.statement.dataset.encode()
        with self._explain_errors("take the dataset"):
            self._files.invalidate_cache()
            if self._files.exists(manifest):
                if self._files.cat_file(manifest) == content:
                    return signed
                raise DataError(f"{self.address}: has another dataset; give another address, or remove it")
            marker, begun = f"{self._root}/{_UNFINISHED}", {}
            if self._files.exists(marker) and self._files.cat_file(marker) == name_of:
                objects = self._files.find(self._root, detail=True)
                begun = {str(name): int(facts["size"]) for name, facts in objects.items()}
            self._files.pipe_file(marker, name_of)
            for name, size in sizes.items():
                # an object appears whole or not at all
                if begun.get(f"{self._root}/{name}") != size:
                    self._files.put_file(str(directory / name), f"{self._root}/{name}")
            self._files.pipe_file(manifest, content)
            self._files.rm_file(marker)
        return signed

    def read_signed(self, signer: str | None = None) -> SignedDataset:
        """Return the verified manifest."""
        with self._explain_errors("be read"), self._files.open(f"{self._root}/{DATASET_FILE}", "rb") as stream:
            content = stream.read(MAX_MANIFEST_BYTES + 1)
        if len(content) > MAX_MANIFEST_BYTES:
            raise DataError(f"{self.address}: its manifest exceeds {MAX_MANIFEST_BYTES} bytes; not used")
        return verify_dataset(content, Path(f"{self.address}/{DATASET_FILE}"), signer)

    def download_dataset(
        self, directory: Path, signer: str | None = None, *, with_tokens: bool = True
    ) -> SignedDataset:
        """Bring the dataset to a new directory: only files that its manifest names, and no more bytes than it says.

        Leaves are still verified when they are first read.

        Args:
            with_tokens: Bring the files of tokens too; else their hashes alone, and `fetch_bytes` brings what is read.

        Raises:
            DataError: The manifest is altered or signed with another key, a file is missing or of another size, or the
                disk is full.
        """
        signed = self.read_signed(signer)
        sizes = {**_files_of(signed.manifest), DATASET_FILE: MAX_MANIFEST_BYTES}
        if not with_tokens:
            sizes = {name: size for name, size in sizes.items() if not _is_token_file(name)}
        with self._explain_errors("be read"):
            if self._files.exists(f"{self._root}/{_TOKENIZER}"):
                sizes.setdefault(_TOKENIZER, _MAX_TOKENIZER_BYTES)
        publish_directory(directory, lambda folder: self._download_files(folder, sizes))
        return signed

    def fetch_bytes(self, name: str, begin: int, stop: int) -> bytes:
        """Return bytes ``begin .. stop - 1`` of a file, or fewer where the store has no more; nothing is verified."""
        with self._explain_errors(f"bring {name}"):
            content = self._files.cat_file(f"{self._root}/{name}", start=begin, end=stop)
        return bytes(content)

    def _download_files(self, folder: Path, sizes: dict[str, int]) -> None:
        for name, max_bytes in sizes.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with (
                self._explain_errors(f"bring {name}"),
                self._files.open(f"{self._root}/{name}", "rb") as source,
                path.open("wb") as target,
            ):
                while piece := source.read(_PIECE_BYTES):
                    if target.tell() + len(piece) > max_bytes:
                        raise DataError(f"{self.address}/{name}: exceeds its signed size of {max_bytes} bytes")
                    target.write(piece)
                target.flush()
                os.fsync(target.fileno())

    @contextlib.contextmanager
    def _explain_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as exc:
            raise DataError(f"{self.address}: cannot {what}: it is missing or incomplete").with_facts(
                code="PHX-I011", file=self.address
            ) from exc
        except client_errors() as exc:
            raise DataError(
                f"{self.address}: cannot {what} ({reason_of(exc)}); check network, credentials and space"
            ).with_facts(file=self.address) from exc


def _is_token_file(name: str) -> bool:
    path = PurePosixPath(name)
    return path.parts[0] == "shards" and path.name.startswith("tokens-") and not path.name.endswith(TREE)


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as exc:
        raise DataError(f"{path}: cannot be read ({exc.strerror}); restore it from a copy").with_facts(
            code="PHX-I027", file=str(path)
        ) from exc


def _files_of(manifest: DatasetManifest) -> dict[str, int]:
    """Return every file that a manifest speaks for, with the most bytes that it may have."""
    tag = 0 if manifest.seal is None else TAG_BYTES
    tables = {"shards/index/table": manifest.index.table, "shards/index/nodes": manifest.index.nodes}
    for part in manifest.parts:
        tables |= {f"{part.shard_directory}/tokens-{number:05}": shard for number, shard in enumerate(part.shards)}
        tables |= {f"{part.shard_directory}/{name}": getattr(part, name) for name in ("starts", "records", "entries")}
    sizes = {}
    for name, record in tables.items():
        leaves = record.num_leaves(manifest.leaf_bytes)
        sizes[name], sizes[name + TREE] = record.size_bytes + tag * leaves, HASH_BYTES * leaves
    for name, beside in manifest.files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise DataError(f"dataset: the path {name[:200]!r} of a further file is outside of the dataset; not used")
        sizes[name] = beside.size_bytes
    return sizes if manifest.seal is None else {**sizes, WRAPPED_KEY_FILE: _MAX_KEY_BYTES}
