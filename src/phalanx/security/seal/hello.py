"""The hello: a side's name, its terms and its half of a fresh secret, signed with its message key."""

import re
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.config import canonical_json
from phalanx.errors import SealError, SignatureError
from phalanx.security.crypto import Identity, Peer, in_domain, parse_canonical
from phalanx.security.seal.context import DIGEST_BYTES, SESSION_BYTES, Terms
from phalanx.security.seal.direction import MAX_EPOCH
from phalanx.security.seal.header import SealRefusal

SALT_BYTES = CURVE_BYTES = 32
_LATTICE_KEY_BYTES, _CIPHERTEXT_BYTES = 1184, 1088
MAX_HELLO_BYTES = 8192
_VERSION = 2
_DOMAIN = "seal-hello/2"
_HEX = re.compile(r"(?:[0-9a-f]{2})*")
_SIZES = {
    "config_digest": DIGEST_BYTES,
    "attestation": DIGEST_BYTES,
    "session": SESSION_BYTES,
    "salt": SALT_BYTES,
}
_WRONG_TERMS = {
    "run": SealRefusal.FOREIGN_RUN,
    "config_digest": SealRefusal.FOREIGN_CONFIG,
    "attestation": SealRefusal.FOREIGN_ATTESTATION,
    "client": SealRefusal.FOREIGN_PARTY,
    "server": SealRefusal.FOREIGN_PARTY,
    "chunk_bytes": SealRefusal.FOREIGN_CHUNKING,
}


@dataclass(frozen=True)
class HandshakeHello:
    """One side's half of the handshake.

    Attributes:
        session: 16 bytes; the client's choice, repeated by the server.
        salt: 32 random bytes, drawn for this handshake.
        share: Its X25519 public key, made for this handshake; behind it the client's ML-KEM-768 key, or the server's
            ciphertext for that.
        reply_to: SHA-256 of the client's signed hello in the server's; empty in the client's.
    """

    terms: Terms
    session: bytes
    epoch: int
    salt: bytes
    share: bytes
    reply_to: bytes = b""

    def sign_hello(self, identity: Identity) -> bytes:
        """Return the bytes to send."""
        body = _to_json(self)
        signature = identity.sign_data(in_domain(_DOMAIN, canonical_json(body)))
        return canonical_json({"body": body, "signature": signature.hex()})


def read_hello(data: bytes, terms: Terms, peer: Peer) -> HandshakeHello:
    """Parse a hello and check that the peer signed it and means the same as this side.

    Raises:
        SealError: It is malformed, or for another run, config, attestation or party; `reason` tells which.
    """
    if len(data) > MAX_HELLO_BYTES:
        raise SealError(SealRefusal.MALFORMED, f"hello: {len(data)} bytes, at most {MAX_HELLO_BYTES}")
    try:
        message = parse_canonical(data)
        _check_keys(message, {"body": dict, "signature": str}, "hello")
        body, signature = message["body"], _from_hex(message["signature"], 64, "signature")
        _check_keys(body, _TYPES, "hello")
    except ValueError as exc:
        raise SealError(SealRefusal.MALFORMED, f"hello: {exc}") from exc
    if body["version"] != _VERSION:
        raise SealError(SealRefusal.OTHER_VERSION, f"hello: version {body['version']}, expected {_VERSION}")
    try:
        peer.verify_signature(signature, in_domain(_DOMAIN, canonical_json(body)))
    except SignatureError as exc:
        raise SignatureError(f"hello of {peer.name}: the signature does not match") from exc
    return _from_json(body, terms)


def _to_json(hello: HandshakeHello) -> dict[str, Any]:
    flat = asdict(hello)
    flat.update(flat.pop("terms"))
    return {"version": _VERSION} | {k: v.hex() if isinstance(v, bytes) else v for k, v in flat.items()}


_TYPES = {
    "version": int,
    "run": str,
    "client": str,
    "server": str,
    "chunk_bytes": int,
    "epoch": int,
    "reply_to": str,
    "share": str,
} | dict.fromkeys(_SIZES, str)


def _from_json(body: dict[str, Any], terms: Terms) -> HandshakeHello:
    try:
        raw = {name: _from_hex(body[name], size, name) for name, size in _SIZES.items()}
        lattice_bytes = _CIPHERTEXT_BYTES if body["reply_to"] else _LATTICE_KEY_BYTES
        raw["share"] = _from_hex(body["share"], CURVE_BYTES + lattice_bytes, "share")
        reply_to = _from_hex(body["reply_to"], len(body["reply_to"]) and DIGEST_BYTES, "reply_to")
    except ValueError as exc:
        raise SealError(SealRefusal.MALFORMED, f"hello: {exc}") from exc
    for name, reason in _WRONG_TERMS.items():
        value, expected = raw.get(name, body[name]), getattr(terms, name)
        if value != expected:
            raise SealError(
                reason, f"hello: its {name} is {_shorten_value(value)}, expected {_shorten_value(expected)}"
            )
    if not 0 < body["epoch"] <= MAX_EPOCH:
        raise SealError(SealRefusal.MALFORMED, f"hello: epoch {body['epoch']}, expected 1 to {MAX_EPOCH}")
    return HandshakeHello(terms, raw["session"], body["epoch"], raw["salt"], raw["share"], reply_to)


def _check_keys(value: dict[str, Any], types: dict[str, type], where: str) -> None:
    if value.keys() != types.keys():
        raise ValueError(f"its keys are {sorted(value)[:20]}, expected {sorted(types)}")
    for name, kind in types.items():
        # type() and not isinstance(): true is no number here
        if type(value[name]) is not kind:
            raise ValueError(f"{name} is a {type(value[name]).__name__}, expected {kind.__name__} in a {where}")


def _from_hex(text: str, size: int, name: str) -> bytes:
    if _HEX.fullmatch(text) is None or len(text) != 2 * size:
        raise ValueError(f"{name} is not {size} bytes in lowercase hex")
    return bytes.fromhex(text)


def _shorten_value(value: object) -> str:
    text = value.hex() if isinstance(value, bytes) else str(value)
    return f"{text[:40]!r}"
