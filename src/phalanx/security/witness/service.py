"""A witness: it cosigns a head only where that continues the last one that it has cosigned, C2SP tlog-witness.

HOME/name, keys of both kinds; HOME/logs/*.vkey, the logs that it cosigns; HOME/heads/ORIGIN-HASH, its memory.
"""

import fcntl
import hashlib
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from phalanx.closing import Closeable
from phalanx.errors import AuditLogError, PhalanxError, SignatureError
from phalanx.security.crypto import Identity, load_signer, make_signer, write_public
from phalanx.security.crypto.ml_dsa import ML_DSA_KEY, load_ml_dsa_key, make_ml_dsa_key
from phalanx.security.witness.notes import (
    CheckpointSigner,
    NoteKey,
    NoteSignature,
    SignatureKind,
    SignedCheckpoint,
    check_key_name,
    decode_hash,
    parse_decimal,
)
from phalanx.security.witness.published import HistoryCopy, replace_synced
from phalanx.security.witness.tree import EMPTY_ROOT, MAX_PROOF_HASHES, TreeHead, check_consistency

MAX_REQUEST_BYTES = 512 * 1024
SIZE_TYPE, TEXT_TYPE = "text/x.tlog.size", "text/plain; charset=utf-8"
_MAX_CONFLICTS = 16
_EMPTY = TreeHead(0, EMPTY_ROOT)
_Event = MutableMapping[str, Any]


@dataclass(frozen=True)
class WitnessAnswer:
    """An answer over HTTP."""

    status: int
    body: bytes = b""
    content_type: str = TEXT_TYPE


def make_witness(home: Path, name: str, party: str = "witness") -> CheckpointSigner:
    """Make the keys of a witness in a private directory.

    Args:
        name: Name in its signature lines; a host and a path are usual, such as ``example.org/alice``.
    """
    check_key_name(name)
    identity = make_signer(home, home / "signer.json", party)
    ml_dsa_key = make_ml_dsa_key(home / ML_DSA_KEY)
    write_public(home / "name", name.encode() + b"\n")
    return CheckpointSigner(name, identity.signing_key, ml_dsa_key)


def log_signer(identity: Identity, origin: str, home: Path | None = None) -> CheckpointSigner:
    """Return the keys by which a log signs its heads.

    Args:
        home: Where the ML-DSA-44 key of the log's owner is; None where it has none.
    """
    return CheckpointSigner(
        origin, identity.signing_key, None if home is None else load_ml_dsa_key(home / ML_DSA_KEY), is_log=True
    )


def load_witness(home: Path) -> CheckpointSigner:
    """Load the keys that `make_witness` made."""
    name = (home / "name").read_text(encoding="utf-8").strip() if (home / "name").exists() else ""
    return CheckpointSigner(
        check_key_name(name), load_signer(home, home / "signer.json").signing_key, load_ml_dsa_key(home / ML_DSA_KEY)
    )


class Witness(Closeable):
    """The one process that cosigns by these keys.

    Args:
        unix_time: Seconds since 1970.
        demand_both: Cosign only what a log signed by Ed25519 and by ML-DSA-44.

    Raises:
        AuditLogError: Another process has the witness open.

    Guarantees:
        A head is on disk before its cosignature leaves. Of any two heads of a log that it cosigns one continues the
        other, unless HOME is put back to an older state: a `ForkProof` of its own cosignatures shows that.
    """

    def __init__(self, home: Path, *, unix_time: Callable[[], float] = time.time, demand_both: bool = False) -> None:
        self._home, self._unix_time, self._demand_both = home, unix_time, demand_both
        self.signer = load_witness(home)
        self._lock = threading.Lock()
        self._fd = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(self._fd)
            raise AuditLogError(f"{home}: another process is this witness") from exc

    def close(self) -> None:
        """Let another process be this witness; closing twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def answer_request(self, method: str, path: str, body: bytes) -> WitnessAnswer:
        """Answer one request; whatever a stranger sends becomes a status."""
        if method == "POST" and path == "/add-checkpoint":
            return self._add_checkpoint(body)
        parts = path.split("/")
        if method == "GET" and len(parts) == 3 and parts[2] == "checkpoint" and parts[1] in self._origin_hashes():
            file = self._home / "heads" / parts[1]
            if file.exists():
                return WitnessAnswer(200, file.read_bytes())
        return WitnessAnswer(404, b"not here\n")

    def _add_checkpoint(self, body: bytes) -> WitnessAnswer:
        try:
            old_size, path, signed = _parse_request(body)
        except PhalanxError as exc:
            return WitnessAnswer(400, f"{exc}\n".encode())
        origin = signed.checkpoint.origin
        keys = self._log_keys(origin)
        if not keys:
            return WitnessAnswer(404, b"this witness does not know the log\n")
        try:
            kinds = {key.kind for key in signed.check_signatures(keys)}
        except SignatureError:
            kinds = set()
        both = {SignatureKind.LOG_ED25519, SignatureKind.COSIGNATURE_ML_DSA}
        if not kinds or (self._demand_both and kinds != both):
            return WitnessAnswer(403, b"no trusted key of the log signed it, or not by both algorithms\n")
        if old_size > signed.checkpoint.head.size:
            return WitnessAnswer(400, b"the old size is beyond the new one\n")
        with self._lock:
            return self._cosign_next(old_size, path, signed, keys)

    def _cosign_next(
        self, old_size: int, path: list[bytes], signed: SignedCheckpoint, keys: list[NoteKey]
    ) -> WitnessAnswer:
        head, file = signed.checkpoint.head, self._memory_of(signed)
        try:
            last, last_time = self._read_memory(file)
        except (AuditLogError, SignatureError):
            # without its memory a witness must not sign
            return WitnessAnswer(500, b"the memory of this witness cannot be read\n")
        if old_size != last.size:
            return WitnessAnswer(409, f"{last.size}\n".encode(), SIZE_TYPE)
        try:
            check_consistency(last, head, path)
        except AuditLogError as exc:
            if head.size == last.size:
                self._keep_conflict(file.name, signed)
            return WitnessAnswer(422, f"{exc}\n".encode())
        cosignatures = self._sign_and_remember(file, signed, keys, last_time)
        return WitnessAnswer(200, "".join(line.to_line() for line in cosignatures).encode())

    def check_history(self, signed: SignedCheckpoint, history: HistoryCopy) -> None:
        """Return where a head, whose entries are all at hand, continues the last one that was cosigned here.

        Raises:
            AuditLogError: It does not.
        """
        last, head = self._read_memory(self._memory_of(signed))[0], signed.checkpoint.head
        try:
            check_consistency(last, head, history.tree.prove_consistency(last.size, head.size))
        except AuditLogError as exc:
            raise AuditLogError(
                f"{self._home}: has cosigned {last.size} entries of {signed.checkpoint.origin!r}; these {head.size} "
                "do not continue them; nothing is signed"
            ) from exc

    def cosign_history(
        self, signed: SignedCheckpoint, history: HistoryCopy, keys: Sequence[NoteKey]
    ) -> SignedCheckpoint:
        """Cosign a head whose entries are all stored, as a mirror does; it is remembered as any other.

        Raises:
            AuditLogError: It does not continue the last one that was cosigned here.
        """
        with self._lock:
            self.check_history(signed, history)
            file = self._memory_of(signed)
            return signed.with_signatures(self._sign_and_remember(file, signed, keys, self._read_memory(file)[1]))

    def _memory_of(self, signed: SignedCheckpoint) -> Path:
        return self._home / "heads" / _origin_hash(signed.checkpoint.origin)

    def _read_memory(self, file: Path) -> tuple[TreeHead, int]:
        """Return the last head that was cosigned, and the time of that."""
        if not file.exists():
            return _EMPTY, 0
        last = SignedCheckpoint.from_bytes(file.read_bytes())
        return last.checkpoint.head, max(last.check_signatures(self.signer.keys).values(), default=0)

    def _sign_and_remember(
        self, file: Path, signed: SignedCheckpoint, keys: Sequence[NoteKey], last_time: int
    ) -> list[NoteSignature]:
        # of two heads the larger one has no earlier time, also where somebody has put back the clock: it would accuse
        time = max(1, int(self._unix_time()), last_time)
        cosignatures = self.signer.sign_checkpoint(signed.checkpoint, time)
        checked = {(key.name, key.key_id) for key in keys}
        lines = tuple(line for line in signed.signatures if (line.name, line.key_id) in checked)
        replace_synced(file, SignedCheckpoint(signed.checkpoint, (*lines, *cosignatures)).to_bytes())
        return cosignatures

    def _keep_conflict(self, origin_hash: str, signed: SignedCheckpoint) -> None:
        """Store a head of the size of the last one with another root: both signatures prove two histories."""
        directory = self._home / "conflicts"
        name = f"{origin_hash}-{signed.checkpoint.head.size}-{signed.checkpoint.head.root.hex()[:16]}"
        if len(list(directory.glob(f"{origin_hash}-*"))) < _MAX_CONFLICTS:
            replace_synced(directory / name, signed.to_bytes())

    def _log_keys(self, origin: str) -> list[NoteKey]:
        return [key for key in read_log_keys(self._home) if key.name == origin]

    def _origin_hashes(self) -> set[str]:
        return {_origin_hash(key.name) for key in read_log_keys(self._home)}


def add_log(home: Path, keys: list[NoteKey]) -> Path:
    """Have a witness cosign a log, from its next request on."""
    names = {key.name for key in keys}
    if len(names) != 1:
        raise AuditLogError(f"{len(names)} logs at once; give the keys of one")
    path = home / "logs" / f"{_origin_hash(names.pop())}.vkey"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_public(path, "".join(key.to_text() + "\n" for key in keys).encode())
    return path


def read_log_keys(home: Path) -> list[NoteKey]:
    """Return the keys of all logs that a witness cosigns."""
    files = sorted((home / "logs").glob("*.vkey"))
    return [NoteKey.from_text(line) for file in files for line in file.read_text(encoding="utf-8").split("\n") if line]


def _parse_request(body: bytes) -> tuple[int, list[bytes], SignedCheckpoint]:
    head, gap, note = body.partition(b"\n\n")
    try:
        first, *hashes = head.decode("ascii").split("\n")
    except UnicodeDecodeError as exc:
        raise AuditLogError("request: is malformed") from exc
    if not gap or not first.startswith("old ") or len(hashes) > MAX_PROOF_HASHES:
        raise AuditLogError("request: expected an old size, a proof and a checkpoint")
    old_size = parse_decimal(first.removeprefix("old "), "request: old size")
    return old_size, [decode_hash(text, "request: proof") for text in hashes], SignedCheckpoint.from_bytes(note)


def _origin_hash(origin: str) -> str:
    return hashlib.sha256(origin.encode()).hexdigest()


def witness_app(witness: Witness) -> Callable[..., Awaitable[None]]:
    """Return a witness as an ASGI application."""
    logger = logging.getLogger(__name__)

    async def answer(
        scope: _Event, receive: Callable[[], Awaitable[_Event]], send: Callable[[_Event], Awaitable[None]]
    ) -> None:
        if scope["type"] != "http":
            return
        body, more = bytearray(), True
        while more and len(body) <= MAX_REQUEST_BYTES:
            event = await receive()
            body += event.get("body", b"")
            more = event.get("more_body", False)
        if len(body) > MAX_REQUEST_BYTES:
            reply = WitnessAnswer(413, b"the request is too large\n")
        else:
            reply = witness.answer_request(scope["method"], scope["path"], bytes(body))
        logger.info("%s %r: %s", scope["method"], scope["path"][:80], reply.status)
        headers = [(b"content-type", reply.content_type.encode()), (b"content-length", str(len(reply.body)).encode())]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.body})

    return answer
