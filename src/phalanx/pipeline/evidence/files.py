"""The files of a verdict, with everything that it rests on, for others to check."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from pydantic import Field, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.access_gate import note_read
from phalanx.config import StrictModel
from phalanx.engine import Verdict
from phalanx.errors import EvidenceError
from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.protocol.messages import PassedOnHeader
from phalanx.transport.tensors import UNREADABLE

MAX_RECORD_BYTES = 16 * 2**20
MAX_TENSOR_BYTES = 256 * 2**30
"""A tensor file is mapped and hashed in pieces, so that a large one costs its reader time and no memory."""
STAGE_PREFIX = "stage/"
"""Names of the stage's weights, or its whole state, in the tensor file start with this."""
TRUTH_PREFIX = "truth/"
"""Names of the tensors of a weight gradient start with this: recomputed, or the one that was applied."""
CLAIM_PREFIX = "claim/"
"""Names of the tensors of the weight gradient that the guilty party signed, where bits do not decide."""
NOISE_PREFIX = "noise/"
"""Names of the seeds of the noise on each tensor of a weight gradient, in this step of this attempt alone."""
MICROBATCH_INPUTS = ("input", "gradient")
"""Names of what a microbatch was computed from; its number follows where all of a step are shown."""


@dataclass
class ComparedTensors:
    """The tensors and digests that the referee compared.

    Attributes:
        tensors: "input", "gradient", "recomputed", "claimed", "accuser", ``[batch, seq, dim]`` each; of a whole step
            the inputs of every microbatch and the weight gradient.
        weights: Digest of the weights that it recomputed with.
        stage: These weights by name; for an update the whole state before it.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    weights: str = ""
    stage: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class VerdictBasis:
    """All that is known about one verdict.

    Attributes:
        verdict: The guilty party and its offence.
        headers: Signed headers by their role in the verdict.
        certificates: PEM of the parties, with the keys for the signatures.
        authority: PEM of the authority that issued them.
        plan: The run, from which the stage can be built again.
        session: The one for which the headers count.
    """

    verdict: Verdict
    compared: ComparedTensors
    headers: Mapping[str, PassedOnHeader]
    certificates: Mapping[str, str]
    authority: str
    plan: StepPlan
    session: str


class TensorFile(StrictModel):
    """The file beside the record."""

    file: str = Field(pattern=r"^[A-Za-z0-9._-]{1,200}\.safetensors$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class EvidenceRecord(StrictModel):
    """The contents of ``NAME.json``."""

    format: Literal[3]
    session: str = Field(min_length=1, max_length=128)
    """Name that every header bears; the same steps have other names in other sessions."""
    verdict: Verdict
    headers: dict[str, PassedOnHeader]
    authority: str
    certificates: dict[str, str]
    plan: StepPlan
    weights_digest: str
    tensors: TensorFile


def write_evidence(directory: Path, case: VerdictBasis) -> Path:
    """Write one verdict as ``NAME.json`` with its tensors in ``NAME.safetensors`` beside it.

    Returns:
        The path of the JSON file; an older one is never overwritten.

    Guarantees:
        Directory and files are for their owner alone: text can be rebuilt from the tensors between stages.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    compared = case.compared
    tensors = compared.tensors | {f"{STAGE_PREFIX}{name}": tensor for name, tensor in compared.stage.items()}
    path = directory / f"{_free_name(directory, case.verdict)}.json"
    record = EvidenceRecord(
        format=3,
        session=case.session,
        verdict=case.verdict,
        headers=dict(case.headers),
        authority=case.authority,
        certificates=dict(case.certificates),
        plan=case.plan,
        weights_digest=compared.weights,
        tensors=write_tensors(path.with_suffix(".safetensors"), tensors),
    )
    write_record(path, record)
    return path


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> TensorFile:
    """Write the tensors of evidence to a file for its owner alone, and return its name and digest."""
    _create_private(path).close()
    # cloned, because parts of one tensor may share memory, which safetensors refuses
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path)
    return TensorFile(file=path.name, sha256=file_digest(path))


def write_record(path: Path, record: StrictModel) -> None:
    """Write the JSON file of evidence, which is whole or absent, for its owner alone."""
    spare = path.with_name(f"{path.name}.tmp")
    with _create_private(spare) as file:
        file.write(json.dumps(record.model_dump(mode="json"), indent=1, sort_keys=True).encode())
    spare.replace(path)


def _create_private(path: Path) -> BinaryIO:
    """Open a new file that only its owner may read, whatever the umask."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb")


def record_verdict(directory: Path, case: VerdictBasis) -> Verdict:
    """Write one verdict's evidence; the verdict then names the file and its digest."""
    path = write_evidence(directory, case)
    update = {"evidence": f"{directory.name}/{path.name}", "evidence_sha256": file_digest(path)}
    return case.verdict.model_copy(update=update)


def read_evidence(path: Path, *, own: bool = False) -> tuple[EvidenceRecord, dict[str, Tensor], str]:
    """Read a record and the tensors beside it; nothing in them is believed yet but their digest.

    Args:
        own: Whether the reader has just written it, so that no size is too large.

    Returns:
        The record, the tensors, and the SHA-256 of the record's file.

    Raises:
        EvidenceError: A file is missing, too large or malformed, or the tensors are not the record's.
    """
    content = path.read_bytes() if own else read_bounded(path, MAX_RECORD_BYTES)
    try:
        record = EvidenceRecord.model_validate_json(content)
    except ValidationError as exc:
        first = exc.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise EvidenceError(f"{path}: not evidence of this version: {place}: {first['msg']}") from exc
    return record, read_tensors(path.parent, record.tensors), hashlib.sha256(content).hexdigest()


def read_tensors(directory: Path, file: TensorFile) -> dict[str, Tensor]:
    """Map the tensors of evidence, of whichever size, once their digest is that of the record.

    Raises:
        EvidenceError: The file is missing, too large, no safetensors file, or another than the record's.
    """
    path = directory / file.file
    _check_size(path, MAX_TENSOR_BYTES)
    digest = file_digest(path)
    if digest != file.sha256:
        raise EvidenceError(
            f"{path}: SHA-256 is {digest}, the record says {file.sha256}; the tensors were altered or swapped"
        )
    try:
        return load_file(path)
    except UNREADABLE as exc:
        raise EvidenceError(f"{path}: not a safetensors file ({exc})") from exc


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, hex."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        raise EvidenceError(f"{path}: cannot be read ({exc.strerror}); keep both files together") from exc


def _free_name(directory: Path, verdict: Verdict) -> str:
    stem = f"step-{verdict.step:08d}-stage-{verdict.stage}-{verdict.party}"
    name, number = stem, 1
    while (directory / f"{name}.json").exists():
        # a resumed run may judge a step again; the log speaks of the older file as well
        number += 1
        name = f"{stem}-{number}"
    return name


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Read a file of evidence that is no larger than evidence can be."""
    _check_size(path, max_bytes)
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as exc:
        raise EvidenceError(f"{path}: cannot be read ({exc.strerror}); keep both files together") from exc
    if len(content) > max_bytes:
        raise EvidenceError(f"{path}: larger than the limit of {max_bytes} bytes; not read")
    note_read("evidence", hashlib.sha256(content).hexdigest(), path)
    return content


def _check_size(path: Path, max_bytes: int) -> None:
    """Refuse a file by its size, before a byte of it is read."""
    try:
        size_bytes = path.stat().st_size
    except OSError as exc:
        raise EvidenceError(f"{path}: cannot be read ({exc.strerror}); keep both files together") from exc
    if size_bytes > max_bytes:
        raise EvidenceError(f"{path}: larger than the limit of {max_bytes} bytes; not read")
