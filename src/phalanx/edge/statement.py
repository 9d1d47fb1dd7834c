"""The signed statement of an export: its source, its rounding, and the result of its comparison with the source.

The form is an in-toto statement (v1) in a DSSE envelope, which programs of others read too; `verify_statement` compares
a directory with it.
"""

import base64
import binascii
import hashlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from phalanx.checkpoint import manifest_digest
from phalanx.checkpoint.exported import digest_model, is_unread
from phalanx.config import StrictModel, canonical_json
from phalanx.config.text import parse_strict_json
from phalanx.errors import CheckpointError, SignatureError, VerificationError
from phalanx.security.crypto import Identity, Peer, parse_canonical

STATEMENT_FILE = "statement.dsse.json"
_PAYLOAD_TYPE: Literal["application/vnd.in-toto+json"] = "application/vnd.in-toto+json"
_MAX_BYTES = 2**20
_SIGNER = "export-signer"

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,200}\z")]
SourceName = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f/]{1,255}\z")]
"""Of a file that others have named, such as ``.gitattributes``."""
Text = Annotated[str, Field(max_length=500)]


class ExportSource(StrictModel):
    """The model that was exported.

    Attributes:
        weights: Digest over all tensors, as a run signs it at its end.
        files: SHA-256 of each file of the model directory.
        run: Identifier of the run that the directory was exported from; None of a directory without a run.
        checkpoint: SHA-256 of the signed manifest of the checkpoint.
    """

    weights: Digest
    files: dict[SourceName, Digest]
    run: Text | None = None
    step: Annotated[int, Field(ge=0)] | None = None
    checkpoint: Digest | None = None


class ExportFacts(StrictModel):
    """The predicate: how the files were made and compared.

    Attributes:
        quantiser: Program with its version, and the settings that it was given.
        state: ``checked``, or that no independent runtime compared the files; the table is ``differences.json``.
        compared: How many texts, prompts and tokens were compared; None where nothing was.
    """

    format: Text
    precision: Text
    quantiser: dict[Text, Text | int]
    source: ExportSource
    state: Text
    runtime: Text | None
    compared: dict[Text, int] | None
    phalanx: Text


class _FileDigest(StrictModel):
    sha256: Digest


class _Subject(StrictModel):
    name: FileName
    digest: _FileDigest


class _Statement(StrictModel):
    type: Literal["https://in-toto.io/Statement/v1"] = Field("https://in-toto.io/Statement/v1", alias="_type")
    subject: Annotated[tuple[_Subject, ...], Field(min_length=1, max_length=1000)]
    predicate_type: Literal["urn:phalanx:edge-export:1"] = Field("urn:phalanx:edge-export:1", alias="predicateType")
    predicate: ExportFacts


class _Signature(StrictModel):
    keyid: Digest
    sig: Text


class _Envelope(StrictModel):
    payload: Annotated[str, Field(max_length=_MAX_BYTES)]
    payload_type: Literal["application/vnd.in-toto+json"] = Field(_PAYLOAD_TYPE, alias="payloadType")
    signatures: Annotated[tuple[_Signature, ...], Field(min_length=1, max_length=1)]


@dataclass(frozen=True)
class ExportOrigin:
    """Who signs an export, and the checkpoint that its model directory was made from."""

    signer: Identity
    run: str | None = None
    step: int | None = None
    checkpoint: str | None = None

    def describe_source(self, directory: Path) -> ExportSource:
        """Return the digests of a model directory."""
        files = {path.name: digest_file(path) for path in sorted(directory.iterdir()) if path.is_file()}
        return ExportSource(
            weights=digest_model(directory), files=files, run=self.run, step=self.step, checkpoint=self.checkpoint
        )


@dataclass(frozen=True)
class VerifiedExport:
    """An exported directory whose files match its statement.

    Attributes:
        is_expected: Whether the caller named that key; any key is accepted otherwise.
    """

    facts: ExportFacts
    files: dict[str, str]
    signer: str
    is_expected: bool


def write_statement(directory: Path, facts: ExportFacts, signer: Identity) -> None:
    """Sign the digests of all files of a directory, and put the statement beside them."""
    subjects = [{"name": path.name, "digest": {"sha256": digest_file(path)}} for path in sorted(directory.iterdir())]
    statement = _Statement.model_validate({"subject": tuple(subjects), "predicate": facts})
    payload = canonical_json(statement.model_dump(mode="json", by_alias=True))
    signature = signer.sign_data(_signed_bytes(payload))
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": _PAYLOAD_TYPE,
        "signatures": [{"keyid": signer.public.public_key.hex(), "sig": base64.b64encode(signature).decode()}],
    }
    (directory / STATEMENT_FILE).write_bytes(canonical_json(envelope))


def verify_statement(directory: Path, signer: str | None = None) -> VerifiedExport:
    """Check the signature of an export's statement, and compare the files of the directory with it.

    Args:
        signer: Fingerprint of the key that must have signed; None accepts any key.

    Raises:
        CheckpointError: There is no statement, or a file cannot be read.
        VerificationError: The statement is malformed or altered or signed by another key, or a file was changed, added,
            taken away or replaced by a link.

    Guarantees:
        With `signer`, finds every change by an attacker who can write to the directory and has not the key. Without,
        such an attacker can sign a statement of his own.
    """
    path = directory / STATEMENT_FILE
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as exc:
        raise CheckpointError(f"{path}: cannot be read ({exc.strerror}); export the model again to have one") from exc
    fingerprint, statement = _open_envelope(content, signer, path)
    files = {subject.name: subject.digest.sha256 for subject in statement.subject}
    if len(files) != len(statement.subject):
        raise VerificationError(f"{path}: names a file twice")
    _compare_files(directory, files)
    return VerifiedExport(statement.predicate, files, fingerprint, signer is not None)


def _open_envelope(content: bytes, signer: str | None, path: Path) -> tuple[str, _Statement]:
    try:
        if len(content) > _MAX_BYTES:
            raise ValueError(f"longer than {_MAX_BYTES} bytes")  # noqa: TRY301
        envelope = _Envelope.model_validate_json(canonical_json(parse_strict_json(content)))
        (signature,) = envelope.signatures
        payload = base64.b64decode(envelope.payload, validate=True)
        if signer is not None and signature.keyid != signer:
            raise VerificationError(f"{path}: signed with key {signature.keyid}, expected {signer}")
        peer = Peer.from_hex(_SIGNER, signature.keyid)
        peer.verify_signature(base64.b64decode(signature.sig, validate=True), _signed_bytes(payload))
        return signature.keyid, _Statement.model_validate_json(canonical_json(parse_canonical(payload)))
    except SignatureError as exc:
        raise VerificationError(f"{path}: was altered: its signature does not hold") from exc
    except (ValueError, RecursionError, ValidationError, binascii.Error) as exc:
        raise VerificationError(f"{path}: is no statement of an export: {str(exc).splitlines()[0][:200]}") from exc


def _compare_files(directory: Path, files: dict[str, str]) -> None:
    try:
        present = {path.name for path in directory.iterdir()} - {STATEMENT_FILE}
        if present != set(files):
            strange, missing = sorted(present - set(files)), sorted(set(files) - present)
            raise VerificationError(f"{directory}: not in the statement: {strange}; missing: {missing}")
        for name, digest in files.items():
            path = directory / name
            if path.is_symlink() or not path.is_file():
                raise VerificationError(f"{path}: is no plain file")
            actual = digest_file(path)
            if actual != digest:
                raise VerificationError(f"{path}: was changed: SHA-256 {actual}, in the statement {digest}")
    except OSError as exc:
        raise CheckpointError(f"{directory}: cannot be read ({exc.strerror})") from exc


def compare_source(export: VerifiedExport, directory: Path) -> None:
    """Return when an export was made from a model directory: from its weights, config and tokenizer."""
    actual, source = digest_model(directory), export.facts.source
    if actual != source.weights:
        raise VerificationError(f"{directory}: weights have digest {actual}; the export was made from {source.weights}")
    files = {path.name: digest_file(path) for path in directory.iterdir() if path.is_file()}
    for name in sorted(files.keys() | source.files.keys()):
        # the digest above is that of the tensors, in whatever files
        if not is_unread(directory / name) and files.get(name) != source.files.get(name):
            has, made = files.get(name, "no file"), source.files.get(name, "no file")
            raise VerificationError(f"{directory / name}: found SHA-256 {has:.16}; the export was made from {made:.16}")


def compare_run(export: VerifiedExport, run: str, find_checkpoint: Callable[[int], Path]) -> None:
    """Return when an export was made from a checkpoint of a run.

    Args:
        find_checkpoint: Returns the directory of the checkpoint of a step, verified.

    Raises:
        VerificationError: The export was made from another run or checkpoint, or from a directory.
    """
    source = export.facts.source
    if source.run != run or source.step is None:
        raise VerificationError(f"the export was made from run {source.run}, expected {run}")
    checkpoint = find_checkpoint(source.step)
    actual = manifest_digest(checkpoint)
    if actual != source.checkpoint:
        raise VerificationError(f"{checkpoint}: manifest has SHA-256 {actual}, in the statement {source.checkpoint}")


def software_version() -> str:
    """Return the version of this package."""
    return importlib.metadata.version("phalanx-train")


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _signed_bytes(payload: bytes) -> bytes:
    """Return the bytes that a DSSE signature covers (its "pre-authentication encoding")."""
    return b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD_TYPE), _PAYLOAD_TYPE.encode(), len(payload), payload)
