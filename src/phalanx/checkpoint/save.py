"""Write a checkpoint so that a crash at any moment leaves the last good one as it was."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.checkpoint.keys import KEY_FILE, KeyHolder, new_data_key, wrap_for
from phalanx.checkpoint.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    CheckpointManifest,
    Encryption,
    FileEntry,
    ShardEntry,
    restore_set_aside,
    shard_file,
    sign_manifest,
    step_directory,
)
from phalanx.checkpoint.retention import REMOVING, Retention, prune_checkpoints
from phalanx.checkpoint.sealed import SEALED, FilePlace, FileSealer
from phalanx.checkpoint.stream import Shard, safetensors_pieces
from phalanx.config import canonical_json
from phalanx.errors import CheckpointError
from phalanx.security.audit import HeadEntry, LogHead
from phalanx.security.crypto import Identity

_WRITING = ".writing-"


@dataclass(frozen=True)
class WrittenPieces:
    """Files that ranks have written and forced to disk, each its own part of the state.

    Attributes:
        folder: Folder from `make_folder` that holds nothing else.
    """

    folder: Path
    files: dict[str, FileEntry]
    shards: tuple[ShardEntry, ...]


Pieces = Iterable[bytes | memoryview]


def save_checkpoint(
    directory: Path,
    step: int,
    shards: Iterable[Shard] | WrittenPieces,
    state: Mapping[str, Any],
    *,
    sign: Identity,
    retention: Retention,
    key: KeyHolder | None = None,
    log_head: LogHead | None = None,
) -> Path:
    """Write the checkpoint of one step and remove checkpoints by the retention rule.

    All files are written to a directory beside, forced to disk, and renamed in one go. One process writes to
    `directory` at a time. Checkpoints of later steps, left behind by a run that went back, are removed as well; the new
    one never is.

    Args:
        directory: Directory of the run's checkpoints; made when missing.
        step: Finished steps of the run.
        shards: One per stage, in any order; taken one at a time and let go of before the next. Or what ranks have
            written, whose folder in `directory` becomes the checkpoint.
        state: JSON data with the texts ``run`` and ``config_digest``, and whatever else a resumed run needs.
        retention: Rule of retention; it keeps at least 1.
        key: Encrypts everything but the manifest; None writes in the clear.
        log_head: End of the audit log on this disk; None where there is none.

    Raises:
        CheckpointError: Disk full, no permission, two shards of a stage, `state` is not JSON data, or `key` cannot
            wrap. The last good checkpoint stays.
    """
    if step < 0 or retention.keep < 1:
        raise CheckpointError(
            f"{directory}: step is {step} and keep {retention.keep}; expected step >= 0 and keep >= 1"
        )
    encoded_state = _encode_state(state)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        restore_set_aside(directory)
        temporary = shards.folder if isinstance(shards, WrittenPieces) else make_folder(directory)
        try:
            _remove_left_overs(directory, temporary)
            files = _CheckpointFiles(temporary, state["run"], step, key)
            files.write_file(STATE_FILE, [encoded_state])
            shard_entries = _write_shards(files, shards)
            manifest = CheckpointManifest(
                step=step,
                run=state["run"],
                config_digest=state["config_digest"],
                files=files.entries,
                shards=shard_entries,
                encryption=files.encryption,
                audit_log=None if log_head is None else HeadEntry(**asdict(log_head)),
            )
            write_synced(temporary / MANIFEST_FILE, [sign_manifest(manifest, sign)])
            sync_directory(temporary)
            final = directory / step_directory(step)
            publish_checkpoint(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as exc:
        raise CheckpointError(
            f"{directory}: step {step} cannot be saved ({exc.strerror or exc}); earlier checkpoints are untouched"
        ) from exc
    prune_checkpoints(directory, step, retention)
    return final


class _CheckpointFiles:
    """A writer of the files of one checkpoint, encrypted or not, that notes their entries for the manifest."""

    def __init__(self, target: Path, run: str, step: int, key: KeyHolder | None) -> None:
        self.entries: dict[str, FileEntry] = {}
        self.encryption: Encryption | None = None
        self._target, self._run, self._step = target, run, step
        self._sealer: FileSealer | None = None
        if key is not None:
            data_key = new_data_key()
            self._sealer = FileSealer(data_key)
            self.encryption = Encryption(commitment=self._sealer.key_commitment(run, step))
            write_synced(target / KEY_FILE, [wrap_for(key, data_key, run, step)])

    def write_file(self, name: str, pieces: Pieces) -> None:
        """Write one file; the name is that of the plain one."""
        if self._sealer is not None:
            name += SEALED
            pieces = self._sealer.seal_file(FilePlace(self._run, self._step, name), pieces)
        self.entries[name] = write_synced(self._target / name, pieces)


def make_folder(directory: Path) -> Path:
    """Make a folder for files of a checkpoint that is not whole yet; the next save removes it if it is left behind."""
    directory.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=_WRITING, dir=directory))


def _write_shards(files: _CheckpointFiles, shards: Iterable[Shard] | WrittenPieces) -> tuple[ShardEntry, ...]:
    if isinstance(shards, WrittenPieces):
        if files.encryption is not None:
            raise CheckpointError("pieces of ranks are written in the clear; leave checkpoint.sharded or .encrypt out")
        files.entries.update(shards.files)
        return shards.shards
    entries: dict[int, ShardEntry] = {}
    for shard in shards:
        name = shard_file(shard.stage)
        if shard.stage < 0 or shard.num_steps < 0 or shard.stage in entries:
            raise CheckpointError(f"{name}: stage {shard.stage} is negative or was given twice")
        files.write_file(name, safetensors_pieces(shard.tensors))
        names = tuple(sorted(shard.tensors))
        entries[shard.stage] = ShardEntry(stage=shard.stage, num_steps=shard.num_steps, tensors=names)
        # the loop variable would keep this stage in memory while the next one is fetched
        del shard
    return tuple(entries[stage] for stage in sorted(entries))


def publish_checkpoint(temporary: Path, final: Path) -> None:
    """Rename a whole checkpoint into its place, where an older one of the same step may be."""
    aside = final.with_name(final.name + ".replaced")
    if final.exists():
        # a directory cannot be renamed over another; a crash before the second rename is undone later
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    temporary.rename(final)
    sync_directory(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _remove_left_overs(directory: Path, in_use: Path) -> None:
    for path in directory.iterdir():
        if path == in_use:
            continue
        if path.name.startswith((_WRITING, REMOVING)) or path.name.endswith(".replaced"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _encode_state(state: Mapping[str, Any]) -> bytes:
    for key in ("run", "config_digest"):
        if not isinstance(state.get(key), str):
            raise CheckpointError(f"{STATE_FILE}: {key} is {state.get(key)!r:.80}, expected text")
    try:
        return canonical_json(dict(state))
    except (TypeError, ValueError) as exc:
        raise CheckpointError(f"{STATE_FILE}: is not JSON data: {exc}; write bytes as hex") from exc


def write_synced(path: Path, pieces: Pieces) -> FileEntry:
    """Write a file and force it to disk; every piece is hashed on its way, so nothing is read again."""
    digest, size_bytes = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as stream:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            digest.update(view)
            size_bytes += len(view)
            while view:
                # an unbuffered write may take less than it was given
                view = view[stream.write(view) :]
        os.fsync(stream.fileno())
    return FileEntry(size_bytes=size_bytes, sha256=digest.hexdigest())


def sync_directory(path: Path) -> None:
    """Force a directory's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
