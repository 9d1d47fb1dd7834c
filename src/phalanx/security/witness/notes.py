"""Signed notes and checkpoints: text that others' tools read, with signature lines of a log and of its witnesses.

Source: C2SP signed-note v1.0.0, tlog-checkpoint v1.0.0 and tlog-cosignature as of July 2026.
"""

import base64
import binascii
import hashlib
import re
import struct
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PrivateKey

from phalanx.errors import AuditLogError, SignatureError
from phalanx.security.crypto.ml_dsa import ML_DSA_PUBLIC_BYTES, ML_DSA_SIGNATURE_BYTES, verify_ml_dsa
from phalanx.security.witness.tree import HASH_BYTES, TreeHead

MAX_NOTE_BYTES = 256 * 1024
MAX_SIGNATURES = 64
MAX_SIZE = 2**63 - 1
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)
_ID_BYTES, _TIME_BYTES = 4, 8


class SignatureKind(IntEnum):
    """The signature types of C2SP that are understood here."""

    LOG_ED25519 = 0x01
    COSIGNATURE_ED25519 = 0x04
    COSIGNATURE_ML_DSA = 0x06


_KEY_BYTES = {SignatureKind.LOG_ED25519: 32, SignatureKind.COSIGNATURE_ED25519: 32}
_KEY_BYTES[SignatureKind.COSIGNATURE_ML_DSA] = ML_DSA_PUBLIC_BYTES
_SIGNATURE_BYTES = {SignatureKind.LOG_ED25519: 64, SignatureKind.COSIGNATURE_ED25519: _TIME_BYTES + 64}
_SIGNATURE_BYTES[SignatureKind.COSIGNATURE_ML_DSA] = _TIME_BYTES + ML_DSA_SIGNATURE_BYTES


@dataclass(frozen=True)
class NoteKey:
    """A public key under a name, for one type of signature.

    Attributes:
        public_key: Raw bytes, 32 of Ed25519 or 1312 of ML-DSA-44.
    """

    name: str
    kind: SignatureKind
    public_key: bytes

    def __post_init__(self) -> None:
        check_key_name(self.name)
        if len(self.public_key) != _KEY_BYTES[self.kind]:
            raise AuditLogError(
                f"key of {self.name}: has {len(self.public_key)} bytes, expected {_KEY_BYTES[self.kind]}"
            )

    @property
    def key_id(self) -> bytes:
        """Short name of the key, 4 bytes."""
        return hashlib.sha256(self.name.encode() + b"\n" + bytes([self.kind]) + self.public_key).digest()[:_ID_BYTES]

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read a verifier key, ``NAME+ID+KEY``."""
        name, _, rest = text.partition("+")
        written_id, _, encoded = rest.partition("+")
        raw = decode_base64(encoded, f"verifier key of {name[:80]!r}")
        try:
            key = cls(name, SignatureKind(raw[0]), raw[1:])
        except (ValueError, IndexError) as exc:
            raise AuditLogError(f"verifier key of {name[:80]!r}: its type is not understood") from exc
        if key.key_id.hex() != written_id:
            raise AuditLogError(f"verifier key of {name}: its ID is {written_id[:20]!r}, expected {key.key_id.hex()}")
        return key

    def to_text(self) -> str:
        """Return the key as a line for a policy file."""
        return f"{self.name}+{self.key_id.hex()}+{_base64(bytes([self.kind]) + self.public_key)}"

    def verify_checkpoint(self, checkpoint: "LogCheckpoint", signature: bytes) -> int:
        """Check one signature and return its time, seconds since 1970; 0 for a kind that has none."""
        if len(signature) != _SIGNATURE_BYTES[self.kind]:
            raise SignatureError(f"{self.name}: a signature of {len(signature)} bytes")
        if self.kind is SignatureKind.LOG_ED25519:
            _verify_ed25519(self, signature, checkpoint.text.encode())
            return 0
        time = struct.unpack(">Q", signature[:_TIME_BYTES])[0]
        rest = signature[_TIME_BYTES:]
        if time > MAX_SIZE:
            raise SignatureError(f"{self.name}: its cosignature is of no time")
        if self.kind is SignatureKind.COSIGNATURE_ED25519:
            _verify_ed25519(self, rest, _ed25519_message(checkpoint, time))
        else:
            verify_ml_dsa(self.public_key, rest, _ml_dsa_message(self.name, checkpoint, time), self.name)
        return int(time)


@dataclass(frozen=True)
class LogCheckpoint:
    """The unsigned text of a head: the name of a log, its size, its root.

    Attributes:
        extensions: Further lines; ours have none, and an ML-DSA-44 signature does not cover them.
    """

    origin: str
    head: TreeHead
    extensions: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The text that is signed."""
        lines = (self.origin, str(self.head.size), _base64(self.head.root), *self.extensions)
        return "".join(f"{line}\n" for line in lines)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read the text of a note."""
        origin, *rest = text.removesuffix("\n").split("\n")
        if len(rest) < 2 or not origin or not all(rest):
            raise AuditLogError("checkpoint: expected an origin, a size and a root, a line each")
        size = parse_decimal(rest[0], "checkpoint: size")
        root = decode_hash(rest[1], "checkpoint: root")
        checkpoint = cls(origin, TreeHead(size, root), tuple(rest[2:]))
        if checkpoint.text != text:
            raise AuditLogError("checkpoint: is not in its one form")
        return checkpoint


@dataclass(frozen=True)
class NoteSignature:
    """One signature line of a note, checked or not."""

    name: str
    key_id: bytes
    signature: bytes

    def to_line(self) -> str:
        """Return the line, with its newline."""
        return f"— {self.name} {_base64(self.key_id + self.signature)}\n"

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Read a line without its newline."""
        mark, *rest = line.split(" ")
        if mark != "—" or len(rest) != 2:
            raise AuditLogError("note: expected a signature line")
        raw = decode_base64(rest[1], "note: signature")
        if len(raw) <= _ID_BYTES:
            raise AuditLogError("note: a signature line is too short")
        return cls(check_key_name(rest[0]), raw[:_ID_BYTES], raw[_ID_BYTES:])


@dataclass(frozen=True)
class SignedCheckpoint:
    """A checkpoint with its signature lines; nothing is believed before `check_signatures`."""

    checkpoint: LogCheckpoint
    signatures: tuple[NoteSignature, ...]

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a note."""
        if len(data) > MAX_NOTE_BYTES:
            raise AuditLogError(f"note: {len(data)} bytes, at most {MAX_NOTE_BYTES} are read")
        try:
            note = data.decode("utf-8")
        except UnicodeDecodeError as exc:
            raise AuditLogError("note: is not UTF-8") from exc
        text, gap, rest = note.rpartition("\n\n")
        if not gap or not rest.endswith("\n") or any(ord(sign) < 32 and sign != "\n" for sign in note):
            raise AuditLogError("note: expected a text, an empty line and signature lines")
        lines = rest[:-1].split("\n")
        if len(lines) > MAX_SIGNATURES:
            raise AuditLogError(f"note: {len(lines)} signatures, at most {MAX_SIGNATURES} are read")
        return cls(LogCheckpoint.from_text(text + "\n"), tuple(NoteSignature.from_line(line) for line in lines))

    def to_bytes(self) -> bytes:
        """Return the note."""
        return (self.checkpoint.text + "\n" + "".join(line.to_line() for line in self.signatures)).encode()

    def with_signatures(self, signatures: Iterable[NoteSignature]) -> Self:
        """The same note with more signatures; each key's first one counts."""
        merged = {(one.name, one.key_id): one for one in (*signatures, *self.signatures)}
        return replace(self, signatures=tuple(merged.values()))

    def check_signatures(self, keys: Iterable[NoteKey]) -> dict[NoteKey, int]:
        """Return the keys that signed, each with the time of its signature.

        Raises:
            SignatureError: A signature in the name of one of the keys is false: then the whole note is refused.
        """
        wanted = {(key.name, key.key_id): key for key in keys}
        times = {}
        for line in self.signatures:
            key = wanted.get((line.name, line.key_id))
            if key is not None:
                times[key] = key.verify_checkpoint(self.checkpoint, line.signature)
        return times


@dataclass(frozen=True, repr=False)
class CheckpointSigner:
    """The private keys of a log, or of a witness, under one name.

    Attributes:
        is_log: A log signs its own checkpoints by plain Ed25519 beside ML-DSA-44, a witness by timestamped Ed25519.
        ml_dsa_key: None for a signer that a quantum computer can imitate.
    """

    name: str
    ed25519_key: Ed25519PrivateKey
    ml_dsa_key: MLDSA44PrivateKey | None
    is_log: bool = False

    @property
    def keys(self) -> list[NoteKey]:
        """The public halves, of one or of both kinds."""
        kind = SignatureKind.LOG_ED25519 if self.is_log else SignatureKind.COSIGNATURE_ED25519
        keys = [NoteKey(self.name, kind, self.ed25519_key.public_key().public_bytes_raw())]
        if self.ml_dsa_key is not None:
            public_key = self.ml_dsa_key.public_key().public_bytes_raw()
            keys.append(NoteKey(self.name, SignatureKind.COSIGNATURE_ML_DSA, public_key))
        return keys

    def sign_checkpoint(self, checkpoint: LogCheckpoint, time: int) -> list[NoteSignature]:
        """Sign with every key.

        Args:
            time: Seconds since 1970.
        """
        stamp = struct.pack(">Q", time)
        message = checkpoint.text.encode() if self.is_log else _ed25519_message(checkpoint, time)
        raw = [(b"" if self.is_log else stamp) + self.ed25519_key.sign(message)]
        if self.ml_dsa_key is not None:
            raw.append(stamp + self.ml_dsa_key.sign(_ml_dsa_message(self.name, checkpoint, time)))
        return [NoteSignature(self.name, key.key_id, one) for key, one in zip(self.keys, raw, strict=True)]


def _ed25519_message(checkpoint: LogCheckpoint, time: int) -> bytes:
    return f"cosignature/v1\ntime {time}\n{checkpoint.text}".encode()


def _ml_dsa_message(cosigner: str, checkpoint: LogCheckpoint, time: int) -> bytes:
    names = [name.encode() for name in (cosigner, checkpoint.origin)]
    if not all(1 <= len(name) <= 255 for name in names):
        raise SignatureError(f"{cosigner[:80]}: a name has more than 255 bytes")
    signer, origin = (bytes([len(name)]) + name for name in names)
    head = checkpoint.head
    return b"subtree/v1\n\0" + signer + struct.pack(">Q", time) + origin + struct.pack(">QQ", 0, head.size) + head.root


def _verify_ed25519(key: NoteKey, signature: bytes, message: bytes) -> None:
    try:
        Ed25519PublicKey.from_public_bytes(key.public_key).verify(signature, message)
    except InvalidSignature as exc:
        raise SignatureError(f"{key.name}: the signature does not match the checkpoint") from exc


def check_key_name(name: str) -> str:
    """Return the name of a key unchanged.

    Raises:
        AuditLogError: It is empty, over-long, or holds a space, a plus or a control character.
    """
    is_bad: Callable[[str], bool] = lambda sign: sign == "+" or sign.isspace() or unicodedata.category(sign) == "Cc"  # noqa: E731
    if not name or len(name.encode()) > 255 or any(map(is_bad, name)):
        raise AuditLogError(f"key name {name[:80]!r}: expected 1 to 255 bytes without spaces and plus signs")
    return name


def parse_decimal(text: str, where: str) -> int:
    """Read a number without leading zeroes, at most 2^63 - 1."""
    if _DECIMAL.fullmatch(text) is None or int(text) > MAX_SIZE:
        raise AuditLogError(f"{where}: {text[:40]!r} is no number without leading zeroes")
    return int(text)


def decode_base64(text: str, where: str) -> bytes:
    """Read base64 in its one form."""
    try:
        raw = base64.b64decode(text.encode("ascii"), validate=True)
    except (ValueError, binascii.Error) as exc:
        raise AuditLogError(f"{where}: is not base64") from exc
    if _base64(raw) != text:
        raise AuditLogError(f"{where}: is not base64 in its one form")
    return raw


def decode_hash(text: str, where: str) -> bytes:
    """Read a hash of 32 bytes in base64."""
    raw = decode_base64(text, where)
    if len(raw) != HASH_BYTES:
        raise AuditLogError(f"{where}: has {len(raw)} bytes, expected {HASH_BYTES}")
    return raw


def encode_hash(digest: bytes) -> str:
    """Return a hash as its line has it."""
    return _base64(digest)


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")
