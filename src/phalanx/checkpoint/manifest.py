"""The signed manifest of a checkpoint directory, and the places of a run's checkpoints."""

import hashlib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from phalanx.checkpoint.sealed import SEALED
from phalanx.config import StrictModel, canonical_json
from phalanx.errors import CheckpointError, SignatureError
from phalanx.security.audit import HeadEntry
from phalanx.security.crypto import Identity, Peer, in_domain, parse_canonical

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
_DOMAIN = "checkpoint-manifest/1"
_STEP_DIRECTORY = re.compile(r"step-(\d{8,12})")
_SET_ASIDE = re.compile(r"(step-\d{8,12})\.replaced")

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
_NUMBER = r"(0|[1-9]\d{0,5})"
FileName = Annotated[
    str, Field(pattern=rf"^(state\.json|stage-{_NUMBER}(\.rank-{_NUMBER})?\.safetensors)(\.sealed)?\z")
]


class FileEntry(StrictModel):
    """Size and SHA-256 of one file, so that ``sha256sum`` can check it too."""

    size_bytes: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]


class PieceCut(StrictModel):
    """The place of a rank's rows in a whole tensor.

    Attributes:
        slice: Number of the slice among the tensor parallel ranks; 0 where they do not cut the tensor.
        dim: Dimension that they cut; None where they do not.
        parts: Matrices that lie side by side in that dimension; each was cut by itself.
        first_row: Row of the slice that the piece begins with.
    """

    slice: Count = 0
    dim: Count | None = None
    parts: Annotated[int, Field(ge=1, le=1024)] = 1
    first_row: Count = 0


class PieceEntry(StrictModel):
    """The tensors of a stage in the file of one rank, by name, with their places in the whole ones."""

    rank: Count
    tensors: dict[str, PieceCut]


class ShardEntry(StrictModel):
    """One stage: which tensors its file holds, and how many optimizer steps they have taken.

    Attributes:
        pieces: One for each rank that wrote a part of the stage, in a file of its own; None: one file has it whole.
    """

    stage: Count
    num_steps: Count
    tensors: tuple[str, ...]
    pieces: tuple[PieceEntry, ...] | None = None

    @property
    def file_names(self) -> tuple[str, ...]:
        """Names of the stage's files, where they are not encrypted."""
        if self.pieces is None:
            return (shard_file(self.stage),)
        return tuple(piece_file(self.stage, piece.rank) for piece in self.pieces)


class Encryption(StrictModel):
    """The encryption of all other files; the wrapped data key lies in ``key.json`` and may be wrapped anew.

    Attributes:
        scheme: See `phalanx.checkpoint.sealed`.
        commitment: Commitment to the data key, so that no other one can be put in its place.
    """

    scheme: Literal["aes-256-gcm-chunks/1"] = "aes-256-gcm-chunks/1"
    commitment: Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]


class CheckpointManifest(StrictModel):
    """The contents of a checkpoint; other files are not part of it, except the wrapped key.

    `audit_log` is where the audit log ended when the checkpoint was begun: a log without that line was cut.
    """

    format: Literal["phalanx-checkpoint"] = "phalanx-checkpoint"
    version: Literal[1] = 1
    step: Count
    run: str
    config_digest: str
    files: dict[FileName, FileEntry]
    shards: tuple[ShardEntry, ...]
    encryption: Encryption | None = None
    audit_log: HeadEntry | None = None

    @property
    def file_suffix(self) -> str:
        """Suffix of all files but the manifest and the key."""
        return "" if self.encryption is None else SEALED


def shard_file(stage: int) -> str:
    """Return the file name of a stage's tensors, where they are not encrypted."""
    return f"stage-{stage}.safetensors"


def piece_file(stage: int, rank: int) -> str:
    """Return the file name of one rank's part of a stage."""
    return f"stage-{stage}.rank-{rank}.safetensors"


def step_directory(step: int) -> str:
    """Return the directory name of a step's checkpoint."""
    return f"step-{step:08}"


def step_of(name: str) -> int | None:
    """Return the step that a directory name stands for, or None when it is no checkpoint's name."""
    match = _STEP_DIRECTORY.fullmatch(name)
    return int(match[1]) if match else None


def sign_manifest(manifest: CheckpointManifest, identity: Identity) -> bytes:
    """Return the bytes of ``manifest.json``: canonical JSON with a signature over its body by each key of the party."""
    body = manifest.model_dump(mode="json", exclude_none=True)
    signatures = identity.signature_fields(in_domain(_DOMAIN, canonical_json(body)))
    return canonical_json({"body": body, **signatures, "signer": identity.public.public_key.hex()})


def verify_manifest(data: bytes, peer: Peer, where: Path) -> CheckpointManifest:
    """Check the signature of a manifest, then read it.

    Args:
        data: Bytes of ``manifest.json``.
        peer: The party that must have signed it.
        where: Path of the manifest, for error messages.
    """
    try:
        envelope = parse_canonical(data)
    except ValueError as exc:
        raise CheckpointError(f"{where}: truncated or altered: {exc}").with_facts(code="PHX-I052") from exc
    if set(envelope) - {"ml_dsa_44"} != {"body", "signature", "signer"}:
        raise CheckpointError(f"{where}: found keys {sorted(envelope)}, expected body, signature, signer")
    if envelope["signer"] != peer.public_key.hex():
        raise CheckpointError(
            f"{where}: foreign: signed with key {str(envelope['signer'])[:8]}..., expected that of "
            f"{peer.name}, {peer.public_key.hex()[:8]}...; resume with the identity that began the run"
        ).with_facts(code="PHX-I053")
    try:
        peer.verify_fields(envelope, in_domain(_DOMAIN, canonical_json(envelope["body"])))
    except SignatureError as exc:
        raise CheckpointError(f"{where}: altered: the signature of {peer.name} does not match").with_facts(
            code="PHX-I052"
        ) from exc
    return _read_body(envelope["body"], where)


def manifest_digest(checkpoint: Path) -> str:
    """Return the SHA-256, in hex, of a checkpoint's signed manifest: it names this very checkpoint and no other."""
    try:
        return hashlib.sha256((checkpoint / MANIFEST_FILE).read_bytes()).hexdigest()
    except OSError as exc:
        raise CheckpointError(f"{checkpoint / MANIFEST_FILE}: cannot be read ({exc.strerror})") from exc


def list_checkpoints(directory: Path) -> dict[int, Path]:
    """Return the whole checkpoints of a directory by step; none where there is no directory."""
    if not directory.is_dir():
        return {}
    return {step: path for path in directory.iterdir() if (step := step_of(path.name)) is not None}


def latest_checkpoint(directory: Path) -> Path | None:
    """Return the newest checkpoint by step, or None when there is none.

    Only whole checkpoints count: a half-written one has another name after a crash. Later damage is for
    `open_checkpoint` to refuse; falling back to an older one is never done silently. When a crash fell between the two
    renames that replace a checkpoint of the same step, the old one is put back first.
    """
    try:
        restore_set_aside(directory)
        checkpoints = list_checkpoints(directory)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise CheckpointError(f"{directory}: cannot be read ({exc.strerror})") from exc
    return checkpoints[max(checkpoints)] if checkpoints else None


def restore_set_aside(directory: Path) -> None:
    """Put back a checkpoint that was moved away for a newer one of its step which never arrived."""
    for path in directory.iterdir():
        match = _SET_ASIDE.fullmatch(path.name)
        if match and not (directory / match[1]).exists():
            path.rename(directory / match[1])


def _read_body(body: Any, where: Path) -> CheckpointManifest:
    try:
        manifest = CheckpointManifest.model_validate_json(canonical_json(body))
    except ValidationError as exc:
        first = exc.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{where}: {place}: found {first['input']!r:.80}: {first['msg']}") from exc
    stages = [shard.stage for shard in manifest.shards]
    names = [STATE_FILE, *(name for shard in manifest.shards for name in shard.file_names)]
    expected = {name + manifest.file_suffix for name in names}
    if len(set(stages)) < len(stages) or len(expected) < len(names) or set(manifest.files) != expected:
        raise CheckpointError(
            f"{where}: stages {stages} do not belong to files {sorted(manifest.files)}; use an older checkpoint"
        )
    return manifest
