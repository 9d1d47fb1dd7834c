"""The log's side: it asks the witnesses of a policy for cosignatures, and publishes the cosigned heads."""

import http.client
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from phalanx.errors import AuditLogError, DiskError, SignatureError
from phalanx.security.witness.notes import (
    MAX_NOTE_BYTES,
    CheckpointSigner,
    LogCheckpoint,
    NoteKey,
    NoteSignature,
    SignedCheckpoint,
    encode_hash,
    parse_decimal,
)
from phalanx.security.witness.published import (
    CHECKPOINT,
    HistoryCopy,
    exchange_bytes,
    read_checkpoint,
    replace_synced,
    write_tiles,
)
from phalanx.security.witness.quorum import WitnessPolicy
from phalanx.security.witness.tree import check_consistency

_COSIGNED, _SIGNED = "cosigned", "signed"


@dataclass(frozen=True)
class WitnessReport:
    """The outcome of asking one witness.

    Attributes:
        accusation: What the witness did that it must not; empty where nothing.
    """

    names: tuple[str, ...]
    url: str
    outcome: str
    cosignatures: tuple[NoteSignature, ...] = ()
    accusation: str = ""


@dataclass(frozen=True)
class Publication:
    """A head that was published.

    Attributes:
        has_quorum: Whether the policy is satisfied; a head without is published nevertheless.
    """

    signed: SignedCheckpoint
    reports: tuple[WitnessReport, ...]
    has_quorum: bool
    num_files: int


def publish_head(
    directory: Path,
    history: HistoryCopy,
    signer: CheckpointSigner,
    policy: WitnessPolicy,
    unix_time: Callable[[], float] = time.time,
) -> Publication:
    """Sign the present head of a log, have it cosigned, and write it with its tiles into a directory.

    Raises:
        AuditLogError: What was published in `directory` is no prefix of this history; nothing is signed then.
    """
    checkpoint = LogCheckpoint(signer.name, history.tree.head_at(len(history.tree)))
    for memory in (_SIGNED, CHECKPOINT):
        _check_continues(directory / memory, checkpoint, history)
    # a clock that was put back must not accuse the log
    moment = max(1, int(unix_time()), _last_time(directory / _SIGNED, signer))
    signed = SignedCheckpoint(checkpoint, tuple(signer.sign_checkpoint(checkpoint, moment)))
    num_files = write_tiles(directory, history, checkpoint.head.size)
    # what was signed must be remembered before anybody sees it
    _write_note(directory / _SIGNED, signed)
    reports = ask_witnesses(directory, signed, history, policy)
    signed = signed.with_signatures(one for report in reports for one in report.cosignatures)
    _write_note(directory / CHECKPOINT, signed)
    for report in reports:
        for line in report.cosignatures:
            _write_note(directory / _COSIGNED / line.key_id.hex(), signed)
    return Publication(signed, tuple(reports), policy.judge_checkpoint(signed).has_quorum, num_files)


def _last_time(path: Path, signer: CheckpointSigner) -> int:
    """Return the time of the last head that this log signed; 0 before the first."""
    return max(read_checkpoint(str(path)).check_signatures(signer.keys).values(), default=0) if path.exists() else 0


def _write_note(path: Path, signed: SignedCheckpoint) -> None:
    try:
        replace_synced(path, signed.to_bytes())
    except OSError as exc:
        raise DiskError(f"{path}: cannot be written ({exc.strerror})") from exc


def _check_continues(path: Path, checkpoint: LogCheckpoint, history: HistoryCopy) -> None:
    if not path.exists():
        return
    last = read_checkpoint(str(path)).checkpoint
    if last.origin != checkpoint.origin or last.head.size > checkpoint.head.size:
        raise AuditLogError(
            f"{path}: has {last.head.size} entries of {last.origin!r}, this log {checkpoint.head.size} of "
            f"{checkpoint.origin!r}; a head that was signed cannot be taken back"
        )
    proof = history.tree.prove_consistency(last.head.size, checkpoint.head.size)
    try:
        check_consistency(last.head, checkpoint.head, proof)
    except AuditLogError as exc:
        raise AuditLogError(f"{path}: {exc}; another history was published here, and none is signed") from exc


def ask_witnesses(
    directory: Path, signed: SignedCheckpoint, history: HistoryCopy, policy: WitnessPolicy
) -> list[WitnessReport]:
    """Ask every witness of a policy that has an address, all at once; a dead one costs its timeout and no more."""
    addresses: dict[str, list[tuple[str, NoteKey]]] = {}
    for witness in policy.witnesses:
        if witness.url:
            addresses.setdefault(witness.url, []).append((witness.name, witness.key))
    if not addresses:
        return []
    with ThreadPoolExecutor(len(addresses)) as pool:
        asked = [
            pool.submit(_ask_witness, url, tuple(parties), signed, history, _last_size(directory, parties))
            for url, parties in addresses.items()
        ]
        return [future.result() for future in asked]


def _last_size(directory: Path, parties: list[tuple[str, NoteKey]]) -> int:
    """The largest size that this witness has cosigned, by its own signature."""
    size = 0
    for _, key in parties:
        file = directory / _COSIGNED / key.key_id.hex()
        if file.exists():
            kept = SignedCheckpoint.from_bytes(file.read_bytes()[:MAX_NOTE_BYTES])
            if key in kept.check_signatures([key]):
                size = max(size, kept.checkpoint.head.size)
    return size


def _ask_witness(
    url: str, parties: tuple[tuple[str, NoteKey], ...], signed: SignedCheckpoint, history: HistoryCopy, known_size: int
) -> WitnessReport:
    names, size, accusation = tuple(name for name, _ in parties), known_size, ""
    new_size, submission = signed.checkpoint.head.size, f"{url.rstrip('/')}/add-checkpoint"
    if known_size > new_size:
        return WitnessReport(names, url, f"cosigned {known_size} entries already, this head has {new_size}")
    try:
        for _ in range(2):
            status, body = exchange_bytes("POST", submission, _request_body(size, signed, history), MAX_NOTE_BYTES)
            if status != HTTPStatus.CONFLICT:
                break
            size = parse_decimal(body.decode("ascii").strip(), "answer")
            if size < known_size:
                accusation = f"{'/'.join(names)} remembers {size} entries, and had cosigned {known_size}"
            if size > new_size:
                return WitnessReport(names, url, f"remembers {size} entries, this log has {new_size}", (), accusation)
        if status != HTTPStatus.OK:
            text = body[:200].decode("utf-8", "replace").strip()
            return WitnessReport(names, url, f"refused with {status}: {text}", (), accusation)
        lines = tuple(NoteSignature.from_line(text) for text in body.decode("utf-8").removesuffix("\n").split("\n"))
    except (OSError, http.client.HTTPException, ValueError) as exc:
        return WitnessReport(names, url, f"does not answer ({type(exc).__name__})", (), accusation)
    except AuditLogError as exc:
        return WitnessReport(names, url, f"answers something else ({exc})", (), accusation)
    return _check_answer(WitnessReport(names, url, "cosigned", lines, accusation), parties, signed)


def _check_answer(
    report: WitnessReport, parties: tuple[tuple[str, NoteKey], ...], signed: SignedCheckpoint
) -> WitnessReport:
    answer = SignedCheckpoint(signed.checkpoint, report.cosignatures)
    keys = {(key.name, key.key_id): key for _, key in parties}
    try:
        times = answer.check_signatures(keys.values())
    except SignatureError as exc:
        return WitnessReport(report.names, report.url, f"sent a false signature ({exc})", (), f"{exc}")
    if not all(times.values()) or not times:
        return WitnessReport(
            report.names, report.url, "sent no cosignature of a key in the policy", (), report.accusation
        )
    lines = tuple(line for line in report.cosignatures if (line.name, line.key_id) in keys)
    return WitnessReport(report.names, report.url, report.outcome, lines, report.accusation)


def _request_body(old_size: int, signed: SignedCheckpoint, history: HistoryCopy) -> bytes:
    proof = history.tree.prove_consistency(old_size, signed.checkpoint.head.size)
    return "\n".join([f"old {old_size}", *map(encode_hash, proof), "", ""]).encode() + signed.to_bytes()
