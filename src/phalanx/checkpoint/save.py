"""Write a checkpoint so that a crash at any moment leaves the last good one as it was."""

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from phalanx.checkpoint.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    FileEntry,
    Manifest,
    ShardEntry,
    restore_set_aside,
    shard_file,
    sign_manifest,
    step_directory,
    step_of,
)
from phalanx.checkpoint.shard import Shard
from phalanx.config import canonical_json
from phalanx.errors import CheckpointError
from phalanx.security.crypto import Identity

logger = logging.getLogger(__name__)
_WRITING, _REMOVING = ".writing-", ".removing-"


def save_checkpoint(
    directory: Path,
    step: int,
    shards: Iterable[Shard],
    state: Mapping[str, Any],
    *,
    sign: Identity,
    keep: int,
) -> Path:
    """Write the checkpoint of one step and remove what is no longer kept.

    Everything is written to a directory beside, forced to disk, and renamed in one go. One process writes
    to `directory` at a time. Checkpoints of later steps, which a run that went back has left behind, are
    removed with those beyond `keep`; the new one never is.

    Args:
        directory: Where the checkpoints of the run are; made when missing.
        step: Finished steps of the run.
        shards: One per stage, in any order; taken one at a time and let go of before the next.
        state: JSON data with the texts ``run`` and ``config_digest``, and whatever else a resumed run needs.
        sign: Who vouches for the checkpoint.
        keep: Checkpoints to keep, at least 1.

    Returns:
        The directory of the new checkpoint.

    Raises:
        CheckpointError: Disk full, no permission, two shards of a stage, or `state` is not JSON data. The
            last good checkpoint stays.
    """
    if step < 0 or keep < 1:
        raise CheckpointError(f"{directory}: step is {step} and keep {keep}; expected step >= 0 and keep >= 1")
    encoded_state = _encode_state(state)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        restore_set_aside(directory)
        _remove_left_overs(directory)
        temporary = Path(tempfile.mkdtemp(prefix=_WRITING, dir=directory))
        try:
            _write_bytes(temporary / STATE_FILE, encoded_state)
            manifest = _write_shards(temporary, step, shards, state)
            _write_bytes(temporary / MANIFEST_FILE, sign_manifest(manifest, sign))
            _force_to_disk(temporary / MANIFEST_FILE)
            _sync_directory(temporary)
            final = directory / step_directory(step)
            _publish(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except (OSError, SafetensorError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc)
        raise CheckpointError(
            f"{directory}: step {step} cannot be saved ({reason}); earlier checkpoints are untouched"
        ) from exc
    _prune(directory, step, keep)
    return final


def _write_shards(target: Path, step: int, shards: Iterable[Shard], state: Mapping[str, Any]) -> Manifest:
    files = {STATE_FILE: _force_to_disk(target / STATE_FILE)}
    entries: list[ShardEntry] = []
    for shard in shards:
        name = shard_file(shard.stage)
        if shard.stage < 0 or shard.num_steps < 0 or name in files:
            raise CheckpointError(f"{name}: stage {shard.stage} is negative or was given twice")
        save_file(_apart(shard.tensors), target / name)
        files[name] = _force_to_disk(target / name)
        names = tuple(sorted(shard.tensors))
        entries.append(ShardEntry(stage=shard.stage, num_steps=shard.num_steps, tensors=names))
        # the loop variable would keep this stage in memory while the next one is fetched
        del shard
    return Manifest(
        step=step,
        run=state["run"],
        config_digest=state["config_digest"],
        files=files,
        shards=tuple(sorted(entries, key=lambda entry: entry.stage)),
    )


def _publish(temporary: Path, final: Path) -> None:
    aside = final.with_name(final.name + ".replaced")
    if final.exists():
        # a directory cannot be renamed over another; a crash before the second rename is undone later
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    temporary.rename(final)
    _sync_directory(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _prune(directory: Path, step: int, keep: int) -> None:
    try:
        found = {other: path for path in directory.iterdir() if (other := step_of(path.name)) is not None}
        kept = sorted((other for other in found if other <= step), reverse=True)[:keep]
        for other in found.keys() - set(kept):
            # renamed first, so that a crash in the middle leaves nothing that looks whole
            doomed = directory / f"{_REMOVING}{found[other].name}"
            found[other].rename(doomed)
            shutil.rmtree(doomed)
        _sync_directory(directory)
    except OSError as exc:
        logger.warning("%s: an old checkpoint cannot be removed (%s)", directory, exc.strerror)


def drop_checkpoints_after(directory: Path, step: int) -> None:
    """Remove every checkpoint of a later step.

    Raises:
        CheckpointError: One cannot be removed.
    """
    for path in list(directory.iterdir()) if directory.is_dir() else ():
        found = step_of(path.name)
        if found is not None and found > step:
            doomed = directory / f"{_REMOVING}{path.name}"
            try:
                # renamed first, so that a crash in the middle leaves nothing that looks whole
                path.rename(doomed)
                shutil.rmtree(doomed)
            except OSError as exc:
                raise CheckpointError(f"{path}: cannot be removed ({exc.strerror}); remove it, then --resume") from exc


def _remove_left_overs(directory: Path) -> None:
    for path in directory.iterdir():
        if path.name.startswith((_WRITING, _REMOVING)) or path.name.endswith(".replaced"):
            shutil.rmtree(path)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return dense CPU tensors of which no two share memory, which safetensors refuses to write."""
    result: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        is_part = dense.untyped_storage().nbytes() != dense.numel() * dense.element_size()
        if is_part or dense.data_ptr() in seen:
            dense = dense.clone()
        seen.add(dense.data_ptr())
        result[name] = dense
    return result


def _encode_state(state: Mapping[str, Any]) -> bytes:
    for key in ("run", "config_digest"):
        if not isinstance(state.get(key), str):
            raise CheckpointError(f"{STATE_FILE}: {key} is {state.get(key)!r:.80}, expected text")
    try:
        return canonical_json(dict(state))
    except (TypeError, ValueError) as exc:
        raise CheckpointError(f"{STATE_FILE}: is not JSON data: {exc}; write bytes as hex") from exc


def _write_bytes(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)


def _force_to_disk(path: Path) -> FileEntry:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileEntry(size_bytes=stream.tell(), sha256=sha256)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
