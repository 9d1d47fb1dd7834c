"""The context of a channel: both ends must mean the same, so all of it goes into the keys and into every chunk."""

import re
import struct
from dataclasses import dataclass, field
from enum import IntEnum

from phalanx.errors import SealError
from phalanx.security.crypto import check_party_name
from phalanx.security.seal.header import SealRefusal

DIGEST_BYTES = 32
SESSION_BYTES = 16
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 1, 8 * 2**20
DEFAULT_CHUNK_BYTES = 2**20
_RUN = re.compile(r"[!-~]{1,128}")
_LENGTH = struct.Struct(">H")


class Direction(IntEnum):
    """The direction of a frame."""

    TO_SERVER = 1
    TO_CLIENT = 2


class Purpose(IntEnum):
    """The purpose of a frame; each has a key of its own."""

    ACTIVATION = 1
    LABEL = 2
    GRADIENT = 3
    RESULT = 4
    ADAPTER = 5
    CONTROL = 6


@dataclass(frozen=True)
class Terms:
    """The terms that client and server agree on before the handshake.

    Attributes:
        config_digest: SHA-256 of the run's config, 32 bytes.
        attestation: SHA-256 of the attestation result that this channel rests on, 32 bytes, not all zero.
        chunk_bytes: Plain bytes under one authentication tag, up to 8 MiB; from 1 MiB on the cost of a chunk is lost
            in that of its bytes.
    """

    run: str
    config_digest: bytes
    attestation: bytes
    client: str
    server: str
    chunk_bytes: int = DEFAULT_CHUNK_BYTES

    def __post_init__(self) -> None:
        if _RUN.fullmatch(self.run) is None:
            raise SealError(SealRefusal.MALFORMED, "terms: run is not 1 to 128 plain ASCII characters without blanks")
        for name in ("config_digest", "attestation"):
            if len(getattr(self, name)) != DIGEST_BYTES:
                raise SealError(SealRefusal.MALFORMED, f"terms: {name} has not the {DIGEST_BYTES} bytes of a SHA-256")
        if not any(self.attestation):
            raise SealError(
                SealRefusal.MALFORMED, "terms: attestation is all zero; give the digest of an appraisal result"
            )
        if check_party_name(self.client) == check_party_name(self.server):
            raise SealError(SealRefusal.MALFORMED, f"terms: client and server are both {self.client}")
        if type(self.chunk_bytes) is not int or not MIN_CHUNK_BYTES <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise SealError(
                SealRefusal.MALFORMED,
                f"terms: chunks of {self.chunk_bytes} bytes, expected {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}",
            )


@dataclass(frozen=True)
class Context:
    """The context of a channel: terms and one session under them.

    Attributes:
        session: 16 bytes that the client drew.
        encoded: All of it in one unambiguous way.
    """

    terms: Terms
    session: bytes
    encoded: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.session) != SESSION_BYTES:
            raise SealError(SealRefusal.MALFORMED, f"session: {len(self.session)} bytes, expected {SESSION_BYTES}")
        terms = self.terms
        fields = (
            terms.run.encode("ascii"),
            terms.config_digest,
            terms.attestation,
            terms.client.encode("ascii"),
            terms.server.encode("ascii"),
            terms.chunk_bytes.to_bytes(4, "big"),
            self.session,
        )
        # each field after its length: no two contexts give the same bytes
        encoded = b"".join(_LENGTH.pack(len(field)) + field for field in fields)
        object.__setattr__(self, "encoded", encoded)
