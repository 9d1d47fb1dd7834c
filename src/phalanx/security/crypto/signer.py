"""A signer without a certificate: one Ed25519 key in a private directory, its public half in a file for others."""

from pathlib import Path
from typing import Annotated

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import Field, ValidationError

from phalanx.config import StrictModel, canonical_json
from phalanx.errors import CertificateError
from phalanx.security.crypto.files import make_private_directory, read_public, write_private, write_public
from phalanx.security.crypto.identity import Identity, Peer
from phalanx.security.crypto.keys import SIGNING_KEY, load_signing_key, private_pem


class _PublicHalf(StrictModel):
    name: Annotated[str, Field(max_length=63)]
    public_key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]


def make_signer(home: Path, public_file: Path, name: str) -> Identity:
    """Make a key in a directory that no other user can enter, and write its public half into a file.

    Raises:
        CertificateError: Others have access to the directory, or there is a key already.
    """
    make_private_directory(home)
    identity = Identity(name, Ed25519PrivateKey.generate())
    write_private(home / SIGNING_KEY, private_pem(identity.signing_key))
    half = {"name": name, "public_key": identity.public.public_key.hex()}
    write_public(public_file, canonical_json(half))
    return identity


def load_signer(home: Path, public_file: Path) -> Identity:
    """Load the key of a directory; its name is that in the public file.

    Raises:
        CertificateError: One of the two is missing, readable by others, malformed, or they do not belong together.
    """
    public = read_public_signer(public_file)
    identity = Identity(public.name, load_signing_key(home / SIGNING_KEY))
    if identity.public != public:
        raise CertificateError(f"{home}: its key is not the one whose public half is in {public_file}")
    return identity


def read_public_signer(path: Path) -> Peer:
    """Read the public half of a signer.

    Raises:
        CertificateError: The file is missing or malformed.
    """
    try:
        half = _PublicHalf.model_validate_json(read_public(path))
    except ValidationError as exc:
        raise CertificateError(f"{path}: expected the name and public key of a signer as JSON") from exc
    return Peer.from_hex(half.name, half.public_key)
