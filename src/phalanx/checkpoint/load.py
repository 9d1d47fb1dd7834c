"""Open a checkpoint: its signature and every byte of it are checked before a tensor is read."""

import hashlib
import json
import os
import stat
from collections.abc import Collection, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors.torch import load
from torch import Tensor

from phalanx.access_gate import note_read
from phalanx.checkpoint.keys import KEY_FILE, KeyHolder, unwrap_for
from phalanx.checkpoint.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    CheckpointManifest,
    FileEntry,
    ShardEntry,
    manifest_digest,
    piece_file,
    shard_file,
    step_of,
    verify_manifest,
)
from phalanx.checkpoint.pieces import join_pieces
from phalanx.checkpoint.sealed import FilePlace, FileSealer
from phalanx.checkpoint.stream import Shard
from phalanx.errors import CheckpointError
from phalanx.security.crypto import Peer
from phalanx.transport.tensors import UNREADABLE

_MAX_MANIFEST_BYTES = 64 * 1024 * 1024
_MAX_KEY_BYTES = 256 * 1024
_READERS = 4
"""Threads that read and hash files of one checkpoint."""


def open_checkpoint(
    path: Path,
    peer: Peer,
    *,
    run: str | None,
    config_digest: str | Collection[str] | None,
    at_least_step: int = 0,
    key: KeyHolder | None = None,
) -> "Checkpoint":
    """Verify a checkpoint as a whole.

    Args:
        peer: The party that must have signed it.
        run: The run that it must belong to; None accepts any.
        config_digest: Digest of the run's config, or allowed ones; None accepts any.
        at_least_step: The oldest step to accept: a signature does not tell old from new.
        key: Unwraps the data key of an encrypted checkpoint.

    Raises:
        CheckpointError: Names the file and the fault: missing, extra, truncated, altered, swapped with another step's,
            signed by another key, from another run or config, too old, or encrypted with another key than `key`.

    Guarantees:
        What `Checkpoint.stage_tensors` returns later was part of what `peer` signed: files are verified again on
        the bytes that are parsed, so a change after opening is refused too.
    """
    place = path / MANIFEST_FILE
    manifest = verify_manifest(_read_bytes(place, _MAX_MANIFEST_BYTES), peer, place)
    _check_belonging(path, manifest, run, config_digest)
    if manifest.step < at_least_step:
        raise CheckpointError(
            f"{place}: rolled back: it is from step {manifest.step}, expected step {at_least_step} or later; "
            "restore the newer one, or name the step to return to"
        ).with_facts(code="PHX-I053")
    _check_listing(path, manifest)
    with ThreadPoolExecutor(_READERS) as readers:
        # a generator: the first fault by name is the one that is raised
        for _ in readers.map(lambda name: _check_file(path / name, manifest.files[name]), sorted(manifest.files)):
            pass
    sealer = _open_sealer(path, manifest, key)
    note_read("checkpoint", manifest_digest(path), path, is_sealed=sealer is not None)
    return Checkpoint(path, manifest, sealer)


class Checkpoint:
    """A verified checkpoint; made by `open_checkpoint`.

    Attributes:
        step: Finished steps of the run.
        state: Saved state beside the tensors.
        stages: Indices of the stages, ascending.
        log_head: End of the run's audit log when the checkpoint was begun; None where the caller gave no head.
    """

    def __init__(self, path: Path, manifest: CheckpointManifest, sealer: FileSealer | None = None) -> None:
        self.path = path
        self._sealer = sealer
        self._ending = manifest.file_suffix
        self.step = manifest.step
        self.run = manifest.run
        self.config_digest = manifest.config_digest
        self.log_head = None if manifest.audit_log is None else manifest.audit_log.log_head
        self.stages = tuple(sorted(shard.stage for shard in manifest.shards))
        self._files = manifest.files
        self._shards = {shard.stage: shard for shard in manifest.shards}
        self._cached: Shard | None = None
        self.state = self._read_state()

    def check_base(self, digest: str) -> None:
        """Compare a model's files with the base of the adapter.

        Args:
            digest: Digest from `ModelSource.files_digest`.
        """
        # checkpoints of before this version name no base
        saved = self.state.get("base", digest)
        if saved != digest:
            raise CheckpointError(
                f"{self.path}: foreign: its adapter belongs to a model whose files have digest {saved!s:.12}..., "
                f"but those in [model] have {digest:.12}...; use the former model"
            ).with_facts(code="PHX-I053", file=str(self.path), key="model", found=digest, expected=str(saved))

    def check_vocabulary(self, digest: str) -> None:
        """Compare a vocabulary with the vocabulary of the training.

        Args:
            digest: Digest from `phalanx.data.tokenizers.vocabulary_digest`.
        """
        # checkpoints of before this version name none
        saved = self.state.get("vocabulary", digest)
        if saved != digest:
            raise CheckpointError(
                f"{self.path}: foreign: was trained with the vocabulary {saved!s:.16}..., but that of "
                f"data.tokenizer is {digest:.16}...; use the tokenizer and the text of the run"
            ).with_facts(code="PHX-I057", file=str(self.path), key="data.tokenizer", found=digest, expected=str(saved))

    def stage_tensors(self, stage: int) -> dict[str, Tensor]:
        """Return the tensors of one stage by name, on the CPU."""
        entry = self._shard_entry(stage)
        if entry.pieces is None:
            return self._load_file(shard_file(stage), entry.tensors)
        with ThreadPoolExecutor(_READERS) as readers:
            pieces = readers.map(
                lambda piece: self._load_file(piece_file(stage, piece.rank), piece.tensors), entry.pieces
            )
            parts = [
                (name, piece.tensors[name], tensors[name])
                for piece, tensors in zip(entry.pieces, pieces, strict=True)
                for name in tensors
            ]
        return join_pieces(self.path, entry.tensors, parts)

    def _load_file(self, name: str, expected: Collection[str]) -> dict[str, Tensor]:
        path, data = self._read_listed_file(name)
        try:
            tensors = load(data)
        except UNREADABLE as exc:
            raise CheckpointError(f"{path}: is not a safetensors file: {exc}") from exc
        if sorted(tensors) != sorted(expected):
            raise CheckpointError(f"{path}: its tensors differ from the manifest")
        return tensors

    def read_shard(self, stage: int) -> Shard:
        """Return one stage as it was saved."""
        return Shard(stage, self.stage_tensors(stage), self.num_steps(stage))

    def num_steps(self, stage: int) -> int:
        """Return how many optimizer steps the state of a stage has taken."""
        return self._shard_entry(stage).num_steps

    def stages_by_tensor(self) -> dict[str, int]:
        """Return every tensor name with the stage that holds it; the lowest one where several do."""
        return {name: stage for stage in reversed(self.stages) for name in self._shards[stage].tensors}

    def read_tensor(self, name: str) -> Tensor:
        """Return one tensor by name, whichever stage holds it; the last stage read is kept in memory."""
        stage = self.stages_by_tensor().get(name)
        if stage is None:
            raise CheckpointError(f"{self.path}: no stage holds {name!r:.200}; names() lists the tensors")
        if self._cached is None or self._cached.stage != stage:
            self._cached = None
            self._cached = self.read_shard(stage)
        return self._cached.tensors[name]

    def read_tensors(self, names: Set[str]) -> dict[str, Tensor]:
        """Return tensors by name, whichever stages hold them; each stage is read once.

        Raises:
            CheckpointError: A tensor is missing.
        """
        stages = self.stages_by_tensor()
        if missing := sorted(names - stages.keys()):
            raise CheckpointError(f"{self.path}: lacks {missing[:3]}; it belongs to another model")
        return {name: self.read_tensor(name) for name in sorted(names, key=lambda name: (stages[name], name))}

    def tensor_names(self, stage: int) -> frozenset[str]:
        """Return the names of the tensors that a stage holds."""
        return frozenset(self._shard_entry(stage).tensors)

    def _shard_entry(self, stage: int) -> ShardEntry:
        if stage not in self._shards:
            raise CheckpointError(f"{self.path}: has no stage {stage}; stages: {list(self.stages)}")
        return self._shards[stage]

    def _read_listed_file(self, name: str) -> tuple[Path, bytes]:
        path = self.path / f"{name}{self._ending}"
        data = _read_verified(path, self._files[path.name])
        if self._sealer is None:
            return path, data
        return path, self._sealer.open_file(FilePlace(self.run, self.step, path.name), data, str(path))

    def _read_state(self) -> dict[str, Any]:
        path, data = self._read_listed_file(STATE_FILE)
        try:
            state = json.loads(data)
        except ValueError as exc:
            raise CheckpointError(f"{path}: is not JSON: {exc}") from exc
        if not isinstance(state, dict):
            raise CheckpointError(f"{path}: expected an object")
        return state


def _open_sealer(path: Path, manifest: CheckpointManifest, key: KeyHolder | None) -> FileSealer | None:
    if manifest.encryption is None:
        return None
    place = path / KEY_FILE
    if key is None:
        raise CheckpointError(f"{path}: is encrypted; give its key, as checkpoint.key in the run file does").with_facts(
            code="PHX-I054", file=str(path), key="checkpoint.key"
        )
    data_key = unwrap_for(key, _read_bytes(place, _MAX_KEY_BYTES), manifest.run, manifest.step, place)
    sealer = FileSealer(data_key)
    if sealer.key_commitment(manifest.run, manifest.step) != manifest.encryption.commitment:
        raise CheckpointError(f"{place}: swapped: its data key differs from the signed manifest")
    return sealer


def _check_belonging(
    path: Path, manifest: CheckpointManifest, run: str | None, config_digest: str | Collection[str] | None
) -> None:
    place = path / MANIFEST_FILE
    if run is not None and manifest.run != run:
        raise CheckpointError(
            f"{place}: foreign: it belongs to run {manifest.run!r:.80}, expected {run!r:.80}"
        ).with_facts(code="PHX-I053")
    allowed = {config_digest} if isinstance(config_digest, str) else set(config_digest or ())
    if config_digest is not None and manifest.config_digest not in allowed:
        expected = " or ".join(f"{digest:.12}..." for digest in sorted(allowed)) or "none"
        raise CheckpointError(
            f"{place}: foreign: config digest {manifest.config_digest:.12}..., expected {expected}; resume with the "
            "run file that it was made with"
        ).with_facts(code="PHX-I053")
    named = step_of(path.name)
    if named is not None and named != manifest.step:
        raise CheckpointError(f"{place}: swapped: it belongs to step {manifest.step}, but its directory is {path.name}")


def _check_listing(path: Path, manifest: CheckpointManifest) -> None:
    try:
        present = {entry.name for entry in path.iterdir()}
    except OSError as exc:
        raise CheckpointError(f"{path}: cannot be read ({exc.strerror})") from exc
    expected = {MANIFEST_FILE, *manifest.files, *(() if manifest.encryption is None else (KEY_FILE,))}
    for name in sorted(expected - present):
        raise CheckpointError(f"{path / name}: missing; use an older checkpoint")
    for name in sorted(present - expected):
        raise CheckpointError(f"{path}: holds {name!r:.200}, which the manifest does not name; remove it")


def _check_file(path: Path, entry: FileEntry) -> None:
    with _OpenFile(path) as stream:
        _check_size(path, stream.size_bytes, entry)
        digest = hashlib.file_digest(stream.file, "sha256").hexdigest()
    _check_digest(path, digest, entry)


def _read_verified(path: Path, entry: FileEntry) -> bytes:
    data = _read_bytes(path, entry.size_bytes)
    _check_size(path, len(data), entry)
    _check_digest(path, hashlib.sha256(data).hexdigest(), entry)
    return data


def _read_bytes(path: Path, limit: int) -> bytes:
    with _OpenFile(path) as stream:
        if stream.size_bytes > limit:
            raise CheckpointError(f"{path}: altered: {stream.size_bytes} bytes, expected at most {limit}")
        return stream.file.read(limit + 1)


def _check_size(path: Path, size_bytes: int, entry: FileEntry) -> None:
    if size_bytes != entry.size_bytes:
        word = "truncated" if size_bytes < entry.size_bytes else "altered"
        raise CheckpointError(
            f"{path}: {word}: {size_bytes} bytes, the manifest says {entry.size_bytes}; use an older checkpoint"
        )


def _check_digest(path: Path, digest: str, entry: FileEntry) -> None:
    if digest != entry.sha256:
        raise CheckpointError(
            f"{path}: altered or swapped: SHA-256 {digest[:12]}..., the manifest says "
            f"{entry.sha256[:12]}...; use an older checkpoint"
        ).with_facts(code="PHX-I052", file=str(path))


class _OpenFile:
    """A regular file that is open for reading; links, pipes and devices are refused."""

    def __init__(self, path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError as exc:
            raise CheckpointError(f"{path}: missing; use an older checkpoint") from exc
        except OSError as exc:
            raise CheckpointError(f"{path}: cannot be read ({exc.strerror})") from exc
        self.file = os.fdopen(descriptor, "rb")
        status = os.fstat(descriptor)
        self.size_bytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.file.close()
            raise CheckpointError(f"{path}: is not a regular file")

    def __enter__(self) -> "_OpenFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self.file.close()
