"""Keys of people: in a file, in a TPM, or in a token of PKCS#11; and signatures in files of their own."""

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl, unquote

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key
from pydantic import Field

from phalanx.config import printable_text
from phalanx.config.text import parse_strict_json
from phalanx.errors import CertificateError, PolicyError, SignatureError
from phalanx.security.audit import PersonSigner
from phalanx.security.crypto import read_private, verify_by_fingerprint
from phalanx.security.crypto.identity import P256_ORDER
from phalanx.security.tee.tpm import structures, wire
from phalanx.security.tee.tpm.device import TpmDevice, open_tpm

PersonKey = Annotated[str, Field(pattern=r"^(?:[0-9a-f]{64}|0[23][0-9a-f]{64})\z")]
"""Fingerprint of a key: Ed25519, or a compressed point of P-256."""
PIN = "PHALANX_PKCS11_PIN"
_MAX_SIGNATURE_BYTES = 4_096
_NO_TICKET = struct.pack(">HIH", 0x8024, 0x40000007, 0)
"""The digest was made outside of the TPM."""


class _P256Signer:
    """A signer whose hardware signs a SHA-256 digest."""

    def __init__(self, key: ec.EllipticCurvePublicKey) -> None:
        self.fingerprint = key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint).hex()

    def sign_data(self, data: bytes) -> bytes:
        """Sign as `verify_by_fingerprint` wants it."""
        r, s = self._sign_digest(hashlib.sha256(data).digest())
        return r.to_bytes(32) + min(s, P256_ORDER - s).to_bytes(32)

    def _sign_digest(self, digest: bytes) -> tuple[int, int]:
        raise NotImplementedError


class TpmSigner(_P256Signer):
    """The P-256 key that a TPM derives from its own seed; it never leaves the TPM, and a cleared TPM has another."""

    def __init__(self, tpm: TpmDevice) -> None:
        self._tpm = tpm
        with tpm.primary_key(wire.OWNER, wire.signing_key()) as (_, public):
            key = structures.parse_public(public).key
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise CertificateError("TPM: has no P-256 key to sign with")
        super().__init__(key)

    def _sign_digest(self, digest: bytes) -> tuple[int, int]:
        parameters = wire.size_prefixed(digest) + struct.pack(">H", 0x0010) + _NO_TICKET
        with self._tpm.primary_key(wire.OWNER, wire.signing_key()) as (handle, _):
            answer = self._tpm.send_command(wire.TpmCommand.SIGN, (handle,), parameters, wire.password_authorisation())
        answer.take_bytes(4)
        return int.from_bytes(answer.read_sized(2, 32)), int.from_bytes(answer.read_sized(2, 32))


class TokenSigner(_P256Signer):
    """A P-256 key in a token, which signs inside."""

    def __init__(self, session: Any, label: str) -> None:
        import pkcs11  # noqa: PLC0415 - of the extra `pkcs11`
        from pkcs11.util.ec import encode_ec_public_key  # noqa: PLC0415 - as above

        self._mechanism = pkcs11.Mechanism.ECDSA
        self._key = session.get_key(pkcs11.ObjectClass.PRIVATE_KEY, label=label)
        public = session.get_key(pkcs11.ObjectClass.PUBLIC_KEY, label=label)
        key = load_der_public_key(encode_ec_public_key(public))
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise CertificateError(f"PKCS#11 object {printable_text(label)}: is no P-256 key")
        super().__init__(key)

    def _sign_digest(self, digest: bytes) -> tuple[int, int]:
        signature = self._key.sign(digest, mechanism=self._mechanism)
        return int.from_bytes(signature[:32]), int.from_bytes(signature[32:])


@contextlib.contextmanager
def open_person_signer(reference: str) -> Iterator[PersonSigner]:
    """Open the key of a person.

    Args:
        reference: A file; ``tpm:ADDRESS``, such as ``tpm:/dev/tpmrm0``; or
            ``pkcs11:token=LABEL;object=LABEL?module-path=FILE``, whose PIN is in ``PHALANX_PKCS11_PIN`` or in the
            private file of ``pin-source``.

    Raises:
        DataError, CertificateError, TpmError: There is no such key, or it cannot be read.
    """
    if reference.startswith("tpm:"):
        with open_tpm(reference.removeprefix("tpm:")) as tpm:
            yield TpmSigner(tpm)
    elif reference.startswith("pkcs11:"):
        with _open_token(reference) as (session, label):
            yield TokenSigner(session, label)
    else:
        from phalanx.data.shards import load_signer  # noqa: PLC0415 - numpy, for keys in files alone

        yield load_signer(Path(reference))


@contextlib.contextmanager
def _open_token(reference: str) -> Iterator[tuple[Any, str]]:
    path, _, query = reference.removeprefix("pkcs11:").partition("?")
    names = dict(part.partition("=")[::2] for part in path.split(";"))
    options = dict(parse_qsl(query))
    pin = options.get("pin-source")
    secret = os.environ.get(PIN) if pin is None else read_private(Path(pin.removeprefix("file:"))).decode().strip()
    if not {"token", "object"} <= names.keys() or "module-path" not in options or not secret:
        raise CertificateError(
            f"{printable_text(reference)}: expected pkcs11:token=LABEL;object=LABEL?module-path=FILE, and the PIN in "
            f"{PIN} or in the file of pin-source"
        )
    try:
        import pkcs11  # noqa: PLC0415 - of the extra `pkcs11`
    except ImportError as exc:
        raise CertificateError("pkcs11: needs the extra, pip install 'phalanx-train[pkcs11]'") from exc
    label = unquote(names["object"])
    try:
        token = pkcs11.lib(options["module-path"]).get_token(token_label=unquote(names["token"]))
        with token.open(user_pin=secret) as session:
            yield session, label
    except (pkcs11.exceptions.PKCS11Error, RuntimeError) as exc:
        raise CertificateError(
            f"{printable_text(reference)}: {type(exc).__name__}; check token, object and PIN"
        ) from exc


def write_signature(where: Path, signer: PersonSigner, statement: bytes) -> None:
    """Sign a statement into a file of its own.

    Raises:
        PolicyError: It cannot be written.
    """
    body = {"key": signer.fingerprint, "signature": signer.sign_data(statement).hex()}
    try:
        where.parent.mkdir(exist_ok=True)
        where.write_text(json.dumps(body) + "\n", encoding="ascii")
    except OSError as exc:
        raise PolicyError(f"{where}: cannot be written ({exc.strerror})") from exc


def open_signature(content: bytes, where: Path, signer: str, statement: bytes) -> None:
    """Return when a signature file holds one key's signature of a statement.

    Raises:
        PolicyError: It is no such file, another key's, or a signature of something else.
    """
    try:
        fields = parse_strict_json(content[: _MAX_SIGNATURE_BYTES + 1])
        key, signature = str(fields["key"]), bytes.fromhex(fields["signature"])
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise PolicyError(f"{where}: is no signature; expected an object with key and signature") from exc
    if key != signer:
        raise PolicyError(f"{where}: is signed by {printable_text(key, 64)}, expected {signer}")
    try:
        verify_by_fingerprint(signer, signature, statement)
    except SignatureError as exc:
        raise PolicyError(f"{where}: does not belong to the file that it lies beside, which was changed since") from exc
