"""Copies of checkpoints in an object store, through fsspec; a downloaded copy is judged like a stranger's disk."""

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO

from phalanx.checkpoint.keys import KEY_FILE
from phalanx.checkpoint.manifest import MANIFEST_FILE, CheckpointManifest, step_directory, step_of, verify_manifest
from phalanx.checkpoint.save import publish_checkpoint, sync_directory
from phalanx.errors import CheckpointError
from phalanx.object_stores import client_errors, open_store, reason_of
from phalanx.security.crypto import Peer

_MAX_MANIFEST_BYTES = 64 * 1024 * 1024
_MAX_KEY_BYTES = 256 * 1024
_MAX_KEPT_BYTES = 1024 * 1024 * 1024
_PIECE_BYTES = 2**20
_BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
"""Stores without folders: there, making one would make a bucket."""


class RemoteStore:
    """One run's folder in an object store.

    Credentials and endpoints come from where the store's own client looks for them (environment, profiles), never
    from a config.

    Args:
        address: Such as ``s3://bucket/folder``.
        run: Name of the run; its folder inside.
    """

    def __init__(self, address: str, run: str) -> None:
        self._address = f"{address.rstrip('/')}/{run}"
        try:
            self._files, self._root = open_store(self._address)
        except (ImportError, ValueError) as exc:
            # an unknown protocol is a ValueError
            raise CheckpointError(
                f"checkpoint.remote: {address}: {exc}; install phalanx-train[s3], or the client that fsspec names"
            ).with_facts(code="PHX-I055", key="checkpoint.remote") from exc
        protocols = self._files.protocol
        self._has_folders = _BUCKETS.isdisjoint({protocols} if isinstance(protocols, str) else protocols)
        self._has_kept = False

    def list_steps(self) -> set[int]:
        """Return the steps of the whole checkpoints that are there."""
        return {step for step, names in self._list_folders().items() if MANIFEST_FILE in names}

    def _list_folders(self) -> dict[int, set[str]]:
        """Return the names of the files that are there, by step."""
        with self._explain_errors("be listed"):
            # another process may have written since the last look
            self._files.invalidate_cache()
            files = self._files.find(self._root) if self._files.exists(self._root) else []
        names: dict[int, set[str]] = {}
        for _, folder, name in (parts for path in files if len(parts := str(path).rsplit("/", 2)) == 3):
            if (step := step_of(folder)) is not None:
                names.setdefault(step, set()).add(name)
        return names

    def upload_checkpoint(self, checkpoint: Path) -> None:
        """Copy a whole checkpoint; its manifest goes last, so that half a copy is none."""
        folder = f"{self._root}/{checkpoint.name}"
        names = sorted(path.name for path in checkpoint.iterdir() if path.name != MANIFEST_FILE)
        with self._explain_errors(f"take {checkpoint.name}"):
            if self._has_folders:
                self._files.makedirs(folder, exist_ok=True)
            if self._files.exists(f"{folder}/{MANIFEST_FILE}"):
                self._files.rm_file(f"{folder}/{MANIFEST_FILE}")
            for name in (*names, MANIFEST_FILE):
                self._files.put_file(str(checkpoint / name), f"{folder}/{name}")

    def upload_kept(self, kept: Path) -> None:
        """Copy the run directory's files of its model beside the checkpoints, once in a session: they do not change."""
        if self._has_kept or not kept.is_dir():
            return
        folder = f"{self._root}/{kept.name}"
        with self._explain_errors(f"take {kept.name}"):
            if self._has_folders:
                self._files.makedirs(folder, exist_ok=True)
            for path in sorted(kept.iterdir()):
                self._files.put_file(str(path), f"{folder}/{path.name}")
        self._has_kept = True

    def fetch_kept(self, signed: Mapping[str, str], kept: Path, *, wrapped: bool) -> None:
        """Bring back what `upload_kept` copied; only files that a checkpoint has signed the digests of.

        Args:
            signed: Their SHA-256 in hex, by name.
            kept: Directory that is made here.
            wrapped: They are encrypted, and the wrapped key, which no checkpoint signs, belongs to them.

        Raises:
            CheckpointError: A file is missing, altered or named outside of the directory, or the disk is full.
        """
        with self._explain_errors(f"bring {kept.name}"):
            scratch = Path(tempfile.mkdtemp(prefix=f".{kept.name}-", dir=kept.parent))
        try:
            for name in (*signed, *((KEY_FILE,) if wrapped else ())):
                if Path(name).name != name:
                    raise CheckpointError(f"{self._address}/{kept.name}/{name}: is no plain name; not used")
                self._copy_file(f"{kept.name}/{name}", scratch / name, _MAX_KEPT_BYTES)
                digest = hashlib.sha256((scratch / name).read_bytes()).hexdigest()
                if name in signed and digest != signed[name]:
                    raise CheckpointError(
                        f"{self._address}/{kept.name}/{name}: altered: found SHA-256 {digest:.16}, the checkpoint has "
                        f"signed {signed[name]:.16}; not used"
                    ).with_facts(code="PHX-I058", file=name, found=digest, expected=signed[name])
            with self._explain_errors(f"bring {kept.name}"):
                sync_directory(scratch)
                publish_checkpoint(scratch, kept)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def prune_steps(self, kept: Collection[int]) -> None:
        """Remove the checkpoints of all other steps, and half copies of them; each one's manifest goes first."""
        for step, names in sorted(self._list_folders().items()):
            if step in kept:
                continue
            folder = f"{self._root}/{step_directory(step)}"
            with self._explain_errors(f"remove {step_directory(step)}"):
                if MANIFEST_FILE in names:
                    self._files.rm_file(f"{folder}/{MANIFEST_FILE}")
                self._files.rm(folder, recursive=True)

    def fetch_checkpoint(self, step: int, directory: Path, peer: Peer) -> Path:
        """Bring a checkpoint to this disk; only files that a manifest of `peer` names, and no more bytes than it says.

        `open_checkpoint` is still to judge it.

        Raises:
            CheckpointError: The manifest is not signed by `peer`, a file is missing or longer, or the disk is full.
        """
        name = step_directory(step)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=".writing-", dir=directory))
        except OSError as exc:
            raise CheckpointError(f"{directory}: cannot be written ({exc.strerror})") from exc
        try:
            self._copy_file(f"{name}/{MANIFEST_FILE}", temporary / MANIFEST_FILE, _MAX_MANIFEST_BYTES)
            manifest = verify_manifest(
                (temporary / MANIFEST_FILE).read_bytes(), peer, Path(f"{self._address}/{name}/{MANIFEST_FILE}")
            )
            if manifest.step != step:
                raise CheckpointError(f"{self._address}/{name}: swapped: it is of step {manifest.step}; not used")
            for file, limit in _files_of(manifest).items():
                self._copy_file(f"{name}/{file}", temporary / file, limit)
            with self._explain_errors(f"bring {name}"):
                sync_directory(temporary)
                publish_checkpoint(temporary, directory / name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return directory / name

    def _copy_file(self, remote: str, local: Path, limit: int) -> None:
        with (
            self._explain_errors(f"bring {remote}"),
            self._files.open(f"{self._root}/{remote}", "rb") as source,
            local.open("wb") as target,
        ):
            _copy_at_most(source, target, limit, f"{self._address}/{remote}")
            target.flush()
            os.fsync(target.fileno())

    @contextlib.contextmanager
    def _explain_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as exc:
            raise CheckpointError(f"checkpoint.remote: {self._address} cannot {what}: it is not there") from exc
        except client_errors() as exc:
            raise CheckpointError(
                f"checkpoint.remote: {self._address} cannot {what} ({reason_of(exc)}); check network, credentials "
                "and space"
            ).with_facts(code="PHX-I055", key="checkpoint.remote") from exc


def _files_of(manifest: CheckpointManifest) -> dict[str, int]:
    files = {name: entry.size_bytes for name, entry in manifest.files.items()}
    return files if manifest.encryption is None else {**files, KEY_FILE: _MAX_KEY_BYTES}


def _copy_at_most(source: IO[bytes], target: IO[bytes], limit: int, where: str) -> None:
    copied = 0
    while piece := source.read(_PIECE_BYTES):
        copied += len(piece)
        if copied > limit:
            raise CheckpointError(f"{where}: altered: more than the {limit} bytes that it may have; not used")
        target.write(piece)
