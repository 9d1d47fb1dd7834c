"""The evidence of a verdict on a served stage: written by the owner, and judged again offline by any reader."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import torch
from pydantic import Field
from torch import Tensor

from phalanx.config import StrictModel
from phalanx.errors import EvidenceError, FrameError
from phalanx.pipeline.evidence.checked import Pins, certified_peers, peer_lookup
from phalanx.pipeline.evidence.files import (
    TensorFile,
    file_digest,
    read_tensors,
    write_record,
    write_tensors,
)
from phalanx.pipeline.protocol.messages import PassedOnHeader
from phalanx.pipeline.protocol.signed import to_signed
from phalanx.rollouts.evidence import (
    EvidenceDirectory,
    explain_any_evidence,
    free_path,
    read_format,
    read_pins,
    read_record,
    signed_headers,
)
from phalanx.serve.stages.judgement import PieceRecord, StageBundle, StageVerdict, judge_stage_bundle

FORMAT: Final = "stages/1"
_WEIGHTS, _PREVIOUS = "stage/", "previous_"


class StageEvidence(StrictModel):
    """The contents of ``NAME.json``.

    Attributes:
        headers: Signed headers by role, as in `StageBundle.headers`.
    """

    format: Literal["stages/1"]
    session: str = Field(min_length=1, max_length=128)
    verdict: StageVerdict
    headers: dict[str, PassedOnHeader]
    authority: str
    certificates: dict[str, str]
    text: int | None
    pieces: tuple[PieceRecord, ...]
    tensors: TensorFile


def write_stage_evidence(desk: EvidenceDirectory, bundle: StageBundle, verdict: StageVerdict) -> StageVerdict:
    """Write a bundle and its verdict as ``NAME.json`` with tensors beside it; an older file is never overwritten.

    Returns:
        The verdict, which now names the file and its digest.
    """
    desk.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {f"{_WEIGHTS}{name}": tensor for name, tensor in bundle.weights.items()}
    shown = {"inputs": bundle.inputs, "output": bundle.output}
    tensors |= {name: tensor for name, tensor in shown.items() if tensor is not None}
    for name, payload in (("sent", bundle.sent), ("received", bundle.received)):
        if payload:
            tensors[name] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    path = free_path(desk.directory, f"stages-layer-{verdict.first_layer:05d}-{verdict.party}")
    record = StageEvidence(
        format=FORMAT,
        session=desk.session,
        verdict=verdict,
        headers={role: to_signed(header) for role, header in bundle.headers.items()},
        authority=desk.authority,
        certificates={
            party: pem
            for party, pem in desk.certificates.items()
            if party in (bundle.party, bundle.offer.fields.sender)
        },
        text=bundle.text,
        pieces=tuple(bundle.pieces),
        tensors=write_tensors(path.with_suffix(".safetensors"), tensors),
    )
    write_record(path, record)
    return verdict.model_copy(
        update={"evidence": f"{desk.directory.name}/{path.name}", "evidence_sha256": file_digest(path)}
    )


def list_convictions(directory: Path) -> dict[str, Path]:
    """Return whom files of evidence in a directory convict, and by which file; what cannot be read convicts nobody."""
    convictions: dict[str, Path] = {}
    for path in sorted(directory.glob("stages-*.json")):
        try:
            record = read_record(path, StageEvidence)
        except EvidenceError:
            continue
        convictions[record.verdict.party] = path
    return convictions


def explain_served_evidence(path: Path, authority: Path | None, session: str | None) -> Mapping[str, Any]:
    """Explain the evidence of a verdict on a served stage, on rollouts or on a stage in training.

    Raises:
        EvidenceError: Something does not hold: the party that it accuses is not to be convicted.
    """
    if read_format(path).startswith("stages/"):
        return explain_stage_evidence(path, read_pins(authority, session))
    return explain_any_evidence(path, authority, session)


def explain_stage_evidence(path: Path, pins: Pins) -> Mapping[str, Any]:
    """Judge the records of one verdict on a served stage again, with nothing but its two files.

    Args:
        path: ``NAME.json``; ``NAME.safetensors`` lies beside it.
        pins: Facts that the reader has from elsewhere.

    Returns:
        What was checked, by name; the last two entries are what rests on the owner's word, and the conclusion.

    Raises:
        EvidenceError: Something does not hold: the party that it accuses is not to be convicted.
    """
    record = read_record(path, StageEvidence)
    tensors = read_tensors(path.parent, record.tensors)
    fingerprint, peers = certified_peers(path, record, pins)
    verdict = record.verdict
    try:
        again = judge_stage_bundle(_bundle_of(record, tensors), record.session, peer_lookup(peers))
    except (EvidenceError, FrameError) as exc:
        raise EvidenceError(f"{path}: {exc}") from exc
    if _verdict_core(again) != _verdict_core(verdict):
        finding = "finds nothing wrong" if again is None else f"finds {again.party} guilty of {again.offence}"
        raise EvidenceError(f"{path}: accuses {verdict.party} of {verdict.offence}; a reader {finding}")
    return {
        "verdict": f"{verdict.party} is guilty: {verdict.offence}",
        "reason": verdict.reason,
        "first layer": verdict.first_layer,
        "text": verdict.text,
        "start": verdict.start,
        "file": f"SHA-256 {file_digest(path)}",
        "tensors": f"SHA-256 {record.tensors.sha256}",
        "authority": f"{'as given' if pins.authority else 'not compared'}, fingerprint {fingerprint}",
        "session": f"{record.session}, {'as given' if pins.session else 'not compared'}",
        "judged again": "not" if again is None else again.reason,
        "rests on the owner's word": "nothing",
        "conclusion": f"holds: {verdict.party} signed what its stage does not give",
    }


def _verdict_core(verdict: StageVerdict | None) -> tuple[object, ...] | None:
    """Return the part on which two readers of the same records must agree; distances depend on the machine."""
    if verdict is None:
        return None
    return verdict.party, verdict.first_layer, verdict.offence, verdict.text, verdict.start


def _bundle_of(record: StageEvidence, tensors: Mapping[str, Tensor]) -> StageBundle:
    """Read the bundle of a record; whether it holds is for the judge."""
    headers = signed_headers(record.headers, "offer", "answer")
    payloads = {name: _read_payload(tensors.get(name)) for name in ("sent", "received")}
    return StageBundle(
        party=record.verdict.party,
        offer=headers["offer"],
        answer=headers["answer"],
        step=headers.get("step"),
        second_answer=headers.get("second_answer"),
        previous=[headers[role] for role in sorted(headers) if role.startswith(_PREVIOUS)],
        text=record.text,
        pieces=record.pieces,
        inputs=tensors.get("inputs"),
        output=tensors.get("output"),
        weights={name.removeprefix(_WEIGHTS): value for name, value in tensors.items() if name.startswith(_WEIGHTS)},
        sent=payloads["sent"],
        received=payloads["received"],
    )


def _read_payload(content: Tensor | None) -> bytes:
    if content is None:
        return b""
    if content.dtype != torch.uint8:
        raise EvidenceError("a payload is shown in another form than bytes")
    return content.numpy().tobytes()
