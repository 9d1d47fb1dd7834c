"""Commands to a TPM, byte by byte: framing, authorisation, templates.

Source: TCG, Trusted Platform Module Library, parts 2 (Structures) and 3 (Commands); TCG EK Credential Profile (L-1).
"""

import hashlib
import struct
from collections.abc import Iterable
from enum import IntEnum

from phalanx.errors import RefusedEvidenceError, TpmError
from phalanx.security.tee.formats.reader import ByteReader

OWNER, ENDORSEMENT, _NO_HANDLE, _PASSWORD = 0x40000001, 0x4000000B, 0x40000007, 0x40000009
_NO_SESSIONS, _SESSIONS = 0x8001, 0x8002
_HEADER = struct.Struct(">HII")
SHA256, _NULL, _ECC, _RSA, _KEYED_HASH = 0x000B, 0x0010, 0x0023, 0x0001, 0x0008
_AES_128_CFB = struct.pack(">HHH", 0x0006, 128, 0x0043)
_P256, _ECDSA = 0x0003, 0x0018
_SEAL_ATTRIBUTES = 0x00000412
_AK_ATTRIBUTES, _STORAGE_ATTRIBUTES, _EK_ATTRIBUTES = 0x00050072, 0x00030472, 0x000300B2
_SIGNING_ATTRIBUTES = 0x00040472
MAX_PCR = 23


class TpmCommand(IntEnum):
    """Codes of the commands that are used."""

    NV_DEFINE_SPACE = 0x12A
    CREATE_PRIMARY = 0x131
    NV_INCREMENT = 0x134
    ACTIVATE_CREDENTIAL = 0x147
    NV_READ = 0x14E
    POLICY_SECRET = 0x151
    CREATE = 0x153
    LOAD = 0x157
    QUOTE = 0x158
    SIGN = 0x15D
    UNSEAL = 0x15E
    FLUSH_CONTEXT = 0x165
    NV_READ_PUBLIC = 0x169
    START_AUTH_SESSION = 0x176
    GET_CAPABILITY = 0x17A
    PCR_READ = 0x17E
    POLICY_PCR = 0x17F
    PCR_EXTEND = 0x182


class TpmResponse(ByteReader):
    """Parameters of a response; what cannot be read is the TPM's fault, not that of evidence."""

    def take_bytes(self, size: int) -> bytes:
        """As `ByteReader`, but raises TpmError."""
        try:
            return super().take_bytes(size)
        except RefusedEvidenceError as exc:
            raise TpmError(f"TPM: {exc.detail}") from exc

    def read_sized(self, size_bytes: int, limit: int) -> bytes:
        """As `ByteReader`, but raises TpmError."""
        try:
            return super().read_sized(size_bytes, limit)
        except RefusedEvidenceError as exc:
            raise TpmError(f"TPM: {exc.detail}") from exc


def encode_command(code: TpmCommand, handles: Iterable[int], sessions: Iterable[bytes], parameters: bytes) -> bytes:
    """Write one command."""
    body = b"".join(struct.pack(">I", handle) for handle in handles)
    authorisation = b"".join(sessions)
    if authorisation:
        body += struct.pack(">I", len(authorisation)) + authorisation
    body += parameters
    return _HEADER.pack(_SESSIONS if authorisation else _NO_SESSIONS, _HEADER.size + len(body), code) + body


def decode_response(code: TpmCommand, data: bytes, *, with_handle: bool) -> tuple[int, TpmResponse]:
    """Read one response.

    Returns:
        The handle in it, or 0, and its parameters.
    """
    place = f"response to {code.name}"
    reader = TpmResponse(data, place, big_endian=True)
    tag, size, result = reader.read_unsigned(2), reader.read_unsigned(4), reader.read_unsigned(4)
    if result:
        raise TpmError(f"TPM: refused {code.name} with {result:#x}", result)
    if size != len(data) or tag not in (_NO_SESSIONS, _SESSIONS):
        raise TpmError(f"TPM: {place} is malformed")
    handle = reader.read_unsigned(4) if with_handle else 0
    parameter_size = reader.read_unsigned(4) if tag == _SESSIONS else reader.bytes_left
    return handle, TpmResponse(reader.take_bytes(parameter_size), place, big_endian=True)


def password_authorisation(secret: bytes = b"") -> bytes:
    """Write an authorisation by a password, by default the empty one."""
    return struct.pack(">IHB", _PASSWORD, 0, 0) + size_prefixed(secret)


def session_authorisation(session: int) -> bytes:
    """Write an authorisation by a policy session, which stays open."""
    return struct.pack(">IHBH", session, 0, 1, 0)


def size_prefixed(data: bytes) -> bytes:
    """Write bytes behind their length (TPM2B)."""
    return struct.pack(">H", len(data)) + data


def pcr_selection(indexes: Iterable[int]) -> bytes:
    """Write which PCRs of the SHA-256 bank are meant."""
    chosen = tuple(indexes)
    if not chosen or not all(0 <= pcr <= MAX_PCR for pcr in chosen):
        raise TpmError(f"TPM: PCRs {chosen}, expected one or more of 0 to {MAX_PCR}")
    bits = sum(1 << pcr for pcr in set(chosen)).to_bytes(3, "little")
    return struct.pack(">IHB", 1, SHA256, len(bits)) + bits


def pcr_policy(selection: bytes, values: Iterable[bytes]) -> bytes:
    """Return the policy that holds while the selected PCRs have these values, in the order of their numbers."""
    digest = hashlib.sha256(b"".join(values)).digest()
    return hashlib.sha256(bytes(32) + struct.pack(">I", TpmCommand.POLICY_PCR) + selection + digest).digest()


def attestation_key() -> bytes:
    """Return the template of a P-256 key that signs only structures made by the TPM itself."""
    return _signing_template(_AK_ATTRIBUTES)


def signing_key() -> bytes:
    """Return the template of a P-256 key that signs a digest that is given to it."""
    return _signing_template(_SIGNING_ATTRIBUTES)


def _signing_template(attributes: int) -> bytes:
    head = struct.pack(">HHI", _ECC, SHA256, attributes) + size_prefixed(b"")
    return head + struct.pack(">HHHHH", _NULL, _ECDSA, SHA256, _P256, _NULL) + size_prefixed(b"") + size_prefixed(b"")


def storage_key() -> bytes:
    """Template of the P-256 key below which secrets are stored."""
    head = struct.pack(">HHI", _ECC, SHA256, _STORAGE_ATTRIBUTES) + size_prefixed(b"")
    return head + _AES_128_CFB + struct.pack(">HHH", _NULL, _P256, _NULL) + size_prefixed(b"") + size_prefixed(b"")


def endorsement_key() -> bytes:
    """Template of the RSA 2048 endorsement key that vendors certify (L-1)."""
    step = hashlib.sha256(bytes(32) + struct.pack(">II", TpmCommand.POLICY_SECRET, ENDORSEMENT)).digest()
    head = struct.pack(">HHI", _RSA, SHA256, _EK_ATTRIBUTES) + size_prefixed(hashlib.sha256(step).digest())
    return head + _AES_128_CFB + struct.pack(">HHI", _NULL, 2048, 0) + size_prefixed(bytes(256))


def sealed_object(policy: bytes) -> bytes:
    """Template of a secret that opens under a policy and in no other way."""
    head = struct.pack(">HHI", _KEYED_HASH, SHA256, _SEAL_ATTRIBUTES) + size_prefixed(policy)
    return head + struct.pack(">H", _NULL) + size_prefixed(b"")


def sensitive_area(secret: bytes = b"") -> bytes:
    """Write what an object is created with: no password, and the secret if it is sealed."""
    return size_prefixed(size_prefixed(b"") + size_prefixed(secret))


def policy_session() -> bytes:
    """Parameters of a policy session, beside its two handles."""
    return size_prefixed(bytes(16)) + size_prefixed(b"") + struct.pack(">BHH", 1, _NULL, SHA256)


SESSION_HANDLES = (_NO_HANDLE, _NO_HANDLE)
