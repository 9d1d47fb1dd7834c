"""The files of a verdict, with everything that it rests on, for others to check."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from phalanx.config import StrictModel
from phalanx.engine import Verdict
from phalanx.errors import EvidenceError
from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.protocol.messages import PassedOnHeader

MAX_WEIGHT_BYTES = 64 * 2**20
MAX_RECORD_BYTES = 16 * 2**20
MAX_TENSOR_BYTES = 512 * 2**20
STAGE_PREFIX = "stage/"
"""Names of the stage's weights, or its whole state, in the tensor file start with this."""
TRUTH_PREFIX = "truth/"
"""Names of the tensors of a weight gradient start with this: recomputed, or the one that was applied."""
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
        compared: The tensors that were compared.
        headers: What the parties signed, by the part that it plays.
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

    format: Literal[2]
    session: str = Field(min_length=1, max_length=128)
    """Name that every header bears; the same steps have other names in other sessions."""
    verdict: Verdict
    headers: dict[str, PassedOnHeader]
    authority: str
    certificates: dict[str, str]
    plan: StepPlan
    weights_digest: str
    weights_left_out: str | None
    """Why the stage's weights are not in the tensor file; None when they are, or were not looked at."""
    tensors: TensorFile


def write_evidence(directory: Path, case: VerdictBasis, max_weight_bytes: int = MAX_WEIGHT_BYTES) -> Path:
    """Write one verdict as ``NAME.json`` with its tensors in ``NAME.safetensors`` beside it.

    Args:
        directory: Where evidence is kept.
        case: The verdict and what it rests on.
        max_weight_bytes: Weights of a larger stage are left out, and the record says so.

    Returns:
        The path of the JSON file; an older one is never overwritten.

    Guarantees:
        Directory and files are for their owner alone: text can be rebuilt from the tensors between stages.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    compared = case.compared
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in compared.tensors.items()}
    size_bytes = sum(tensor.nbytes for tensor in compared.stage.values())
    left_out = None
    if size_bytes > max_weight_bytes:
        left_out = f"{size_bytes} bytes of weights, more than the {max_weight_bytes} that evidence may hold"
    else:
        # cloned, because the copy's own tensors may share memory, which safetensors refuses
        tensors |= {
            f"{STAGE_PREFIX}{name}": tensor.detach().cpu().contiguous().clone()
            for name, tensor in compared.stage.items()
        }
    blob = save(tensors)
    name = _free_name(directory, case.verdict)
    _write_private(directory / f"{name}.safetensors", blob)
    record = EvidenceRecord(
        format=2,
        session=case.session,
        verdict=case.verdict,
        headers=dict(case.headers),
        authority=case.authority,
        certificates=dict(case.certificates),
        plan=case.plan,
        weights_digest=compared.weights,
        weights_left_out=left_out,
        tensors=TensorFile(file=f"{name}.safetensors", sha256=hashlib.sha256(blob).hexdigest()),
    )
    path = directory / f"{name}.json"
    spare = directory / f"{name}.json.tmp"
    text = json.dumps(record.model_dump(mode="json"), indent=1, sort_keys=True)
    _write_private(spare, text.encode())
    spare.replace(path)
    return path


def _write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, whatever the umask."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def record_verdict(directory: Path, case: VerdictBasis) -> Verdict:
    """Write one verdict's evidence; the verdict then names the file and its digest."""
    path = write_evidence(directory, case)
    update = {"evidence": f"{directory.name}/{path.name}", "evidence_sha256": file_digest(path)}
    return case.verdict.model_copy(update=update)


def read_evidence(path: Path, *, own: bool = False) -> tuple[EvidenceRecord, dict[str, Tensor], str]:
    """Read a record and the tensors beside it; nothing in them is believed yet but their digest.

    Args:
        path: The JSON file.
        own: Whether the reader has just written it, so that no size is too large.

    Returns:
        The record, the tensors, and the SHA-256 of the record's file.

    Raises:
        EvidenceError: A file is missing, too large, malformed, or the tensors are not those of the record.
    """
    content = path.read_bytes() if own else read_bounded(path, MAX_RECORD_BYTES)
    try:
        record = EvidenceRecord.model_validate_json(content)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise EvidenceError(f"{path}: is no evidence of this version: {where}: {first['msg']}") from exc
    beside = path.parent / record.tensors.file
    blob = beside.read_bytes() if own else read_bounded(beside, MAX_TENSOR_BYTES)
    found = hashlib.sha256(blob).hexdigest()
    if found != record.tensors.sha256:
        raise EvidenceError(
            f"{beside}: SHA-256 is {found}, the record says {record.tensors.sha256}; "
            "the tensors were altered or swapped"
        )
    try:
        tensors = load(blob)
    except (SafetensorError, ValueError, KeyError) as exc:
        raise EvidenceError(f"{beside}: is no safetensors file ({exc})") from exc
    return record, tensors, hashlib.sha256(content).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _free_name(directory: Path, verdict: Verdict) -> str:
    stem = f"step-{verdict.step:08d}-stage-{verdict.stage}-{verdict.party}"
    name, number = stem, 1
    while (directory / f"{name}.json").exists():
        # a resumed run may judge a step again; the log speaks of the older file as well
        number += 1
        name = f"{stem}-{number}"
    return name


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Read a file of evidence that is no larger than evidence can be.

    Raises:
        EvidenceError: It is larger, or cannot be read.
    """
    try:
        # by its size first, so that a huge file costs no memory
        size_bytes = path.stat().st_size
        if size_bytes <= max_bytes:
            with path.open("rb") as file:
                content = file.read(max_bytes + 1)
            size_bytes = len(content)
    except OSError as exc:
        raise EvidenceError(f"{path}: cannot be read ({exc.strerror}); keep both files together") from exc
    if size_bytes > max_bytes:
        raise EvidenceError(f"{path}: is larger than {max_bytes} bytes, which no evidence is; it was not read")
    return content
