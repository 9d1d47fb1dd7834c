"""The token: everything that a machine must know to join, in one line.

``phx1-`` and base64url of: four bytes of a checksum, then JSON in canonical form.
"""

import base64
import binascii
import hashlib
import re
import secrets
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from phalanx.config import canonical_json
from phalanx.errors import ConfigError
from phalanx.security.crypto import check_party_name, digest_hex, in_domain, parse_canonical

_PREFIX = "phx1-"
_MAX_CHARACTERS = 1000
_CHECKSUM_BYTES = 4
_SECRET_BYTES = 32
_LAST_SECOND = 2**40
_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)
_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):(?P<port>[0-9]{1,5})", re.ASCII)


@dataclass(frozen=True, repr=False)
class JoinToken:
    """The contents of a token.

    Attributes:
        address: ``host:port`` where its request is answered.
        authority: Fingerprint of the authority; the server must have a certificate of it.
        secret: Proves that a request comes from the invited machine; random, 32 bytes in hex.
        expires: Second since 1970 from which on it counts no more.
    """

    name: str
    address: str
    authority: str
    secret: str
    expires: int

    def __post_init__(self) -> None:
        check_party_name(self.name)
        split_address(self.address)
        digests = all(isinstance(text, str) and _HEX.fullmatch(text) for text in (self.authority, self.secret))
        if not digests or type(self.expires) is not int or not 0 <= self.expires <= _LAST_SECOND:
            raise ConfigError("token: a field of it is malformed; ask for a new one").with_facts(
                code="PHX-C019", key="TOKEN", do="ask for a new one"
            )

    @classmethod
    def with_fresh_secret(cls, name: str, address: str, authority: str, expires: datetime) -> "JoinToken":
        """Make a token with a fresh secret."""
        return cls(name, address, authority, secrets.token_hex(_SECRET_BYTES), int(expires.timestamp()))

    @classmethod
    def from_text(cls, line: str) -> "JoinToken":
        """Read a token.

        Raises:
            ConfigError: It is cut, altered, of another version or no token at all.
        """
        text = line.strip()
        if len(text) > _MAX_CHARACTERS or not text.startswith(_PREFIX):
            raise ConfigError(f"token: expected one line that begins with {_PREFIX}; copy the whole of it").with_facts(
                code="PHX-C019",
                key="TOKEN",
                found="a wrong checksum",
                expected="the whole line",
                do="copy the whole of it",
            )
        body = text[len(_PREFIX) :]
        try:
            raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
            checksum, data = raw[:_CHECKSUM_BYTES], raw[_CHECKSUM_BYTES:]
            if checksum != hashlib.sha256(data).digest()[:_CHECKSUM_BYTES]:
                raise ConfigError("token: is cut or altered; copy the whole line again").with_facts(
                    code="PHX-C019",
                    key="TOKEN",
                    found="a wrong checksum",
                    expected="the whole line",
                    do="copy the whole line again",
                )
            fields = parse_canonical(data)
            return cls(**{name: fields.pop(name) for name in cls.__annotations__}, **fields)
        except (ValueError, KeyError, TypeError, binascii.Error) as exc:
            raise ConfigError("token: is malformed; ask for a new one").with_facts(
                code="PHX-C019", key="TOKEN", do="ask for a new one"
            ) from exc

    def to_text(self) -> str:
        """Return the token as one line."""
        data = canonical_json(asdict(self))
        raw = hashlib.sha256(data).digest()[:_CHECKSUM_BYTES] + data
        return _PREFIX + base64.urlsafe_b64encode(raw).decode("ascii").rstrip("=")

    @property
    def token_digest(self) -> str:
        """What may be kept of the token: it tells nothing of its secret."""
        return secret_digest(self.secret)

    @property
    def expires_at(self) -> datetime:
        """End of the token's validity, UTC."""
        return datetime.fromtimestamp(self.expires, UTC)

    def __repr__(self) -> str:
        return f"JoinToken({self.name!r}, {self.address!r})"


def secret_digest(secret: str) -> str:
    """Return the digest of a secret; the owner stores only this."""
    return digest_hex(in_domain("invitation/1", secret.encode()))


def secret_purpose(name: str) -> bytes:
    """Return the purpose of a sealed secret: one party's request to be certified."""
    return in_domain("invitation-seal/1", name.encode())


def split_address(address: str) -> tuple[str, int]:
    """Return host and port."""
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise ConfigError(f"address {str(address)[:100]!r}: expected host:port, such as owner.example.org:7070")
    return match["host"].strip("[]"), int(match["port"])
