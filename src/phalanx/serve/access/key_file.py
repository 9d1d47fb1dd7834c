"""The signed file of API keys: salted digests of secrets, and the rights of each key.

ACCESS_DIR/keys.json: one canonical JSON object, ``{"signature": HEX, "statement": {...}}``. Whoever can read the file
learns no secret: a secret is 256 random bits, and the file has its salted digest alone. Whoever can write the file and
has not the operator's key can only take it away: `read_key_file` refuses any other change.
"""

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from phalanx.config import StrictModel, canonical_json, printable_text
from phalanx.errors import KeyFileError, SignatureError
from phalanx.security.crypto import Identity, Peer, digest_hex, in_domain, parse_canonical, replace_file

MAX_KEYS = 10_000
_MAX_FILE_BYTES = 32 * 1024 * 1024
_DOMAIN = "api-keys/1"
_MAX_TIME = 2**40

Count = Annotated[int, Field(ge=0, le=2**53)]
Second = Annotated[int, Field(ge=0, le=_MAX_TIME)]
"""Second since 1970, UTC."""
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]


def _check_plain(text: str) -> str:
    if printable_text(text) != text:
        raise ValueError("holds a character that a terminal does not show as itself")
    return text


def _check_network(text: str) -> str:
    ipaddress.ip_network(text)
    return text


OwnerName = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_check_plain)]
ModelName = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_check_plain)]
Network = Annotated[str, Field(max_length=50), AfterValidator(_check_network)]


class KeyLimits(StrictModel):
    """Budgets of one key. 0 allows nothing; there is no value for "without limit".

    Attributes:
        requests_per_minute: Requests in any 60 seconds.
        tokens_per_minute: Tokens of prompts and completions together, in any 60 seconds.
        requests_per_month: Requests in a calendar month, UTC.
        tokens_per_month: Tokens of prompts and completions in a calendar month, UTC.
        concurrency: Requests that are answered at the same time.
    """

    requests_per_minute: Count = 60
    tokens_per_minute: Count = 100_000
    requests_per_month: Count = 100_000
    tokens_per_month: Count = 10_000_000
    concurrency: Annotated[int, Field(ge=0, le=10_000)] = 8


class KeyTerms(StrictModel):
    """What a key may do; the operator chooses it when the key is made.

    Attributes:
        models: Names of the models that it may use; None allows all.
        networks: Ranges of client addresses in CIDR form; empty allows all.
        expires: The key is refused from this second on.
        may_skip_mark: Whether its requests may ask for text without a watermark.
    """

    owner: OwnerName
    role: Literal["user", "operator"] = "user"
    models: Annotated[tuple[ModelName, ...], Field(max_length=100)] | None = None
    networks: Annotated[tuple[Network, ...], Field(max_length=100)] = ()
    expires: Second
    limits: KeyLimits = KeyLimits()
    may_skip_mark: bool = False


class KeyRecord(StrictModel):
    """One key as the file holds it.

    Attributes:
        key_id: Public part of the secret, by which the record is looked up.
        salt: Random bytes, in hex, that precede the secret in the digest.
        digest: The `secret_digest` of salt and secret.
        revoked: Second of its revocation; None while it is good.
        quarantined: Second since which it is out of service, until it is released; None while it is in service.
    """

    key_id: Annotated[str, Field(pattern=r"^[a-z2-7]{12}\z")]
    salt: Annotated[str, Field(pattern=r"^[0-9a-f]{32}\z")]
    digest: Digest
    created: Second
    revoked: Second | None = None
    quarantined: Second | None = None
    terms: KeyTerms

    def is_active(self, now: float) -> bool:
        """Whether the key is neither revoked nor expired nor out of service.

        Args:
            now: Second since 1970.
        """
        return self.revoked is None and self.quarantined is None and now < self.terms.expires

    def allows_address(self, address: str) -> bool:
        """Whether a client may use the key from its address; a text that is no address passes where all pass."""
        if not self.terms.networks:
            return True
        try:
            client = ipaddress.ip_address(address)
        except ValueError:
            return False
        if isinstance(client, ipaddress.IPv6Address) and client.ipv4_mapped is not None:
            client = client.ipv4_mapped
        return any(client in ipaddress.ip_network(network) for network in self.terms.networks)


class ModelOrder(StrictModel):
    """What the operator has ordered about a model; it holds for every server on the directory, at once.

    Attributes:
        model: Id by which clients name it.
        is_quarantined: It is out of service.
        digests: The files that may answer by this id, as the request log names them; empty for any.
        checkpoint: Where those files are made from; a server that has others opens it. Empty for nowhere.
    """

    model: ModelName
    is_quarantined: bool = False
    digests: Annotated[tuple[Digest, ...], Field(max_length=10)] = ()
    checkpoint: Annotated[str, Field(max_length=4096)] = ""
    since: Second

    def allows_digest(self, digest: str) -> bool:
        """Whether a model may answer.

        Args:
            digest: Of its files; empty where somebody else has them.
        """
        return not self.is_quarantined and (not self.digests or not digest or digest in self.digests)


class KeyFile(StrictModel):
    """All keys, revoked ones included, and the orders about models.

    Attributes:
        sequence: Grows by one with each change, so that a reader refuses a file that is older than one it has read.
    """

    version: Literal[1] = 1
    sequence: Annotated[int, Field(ge=0, le=2**53)] = 0
    keys: Annotated[tuple[KeyRecord, ...], Field(max_length=MAX_KEYS)] = ()
    models: Annotated[tuple[ModelOrder, ...], Field(max_length=1000)] = ()


class _Envelope(StrictModel):
    """The file: a statement and the operator's signature over its canonical JSON."""

    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}\z")]
    statement: dict[str, Any]


def secret_digest(salt: str, secret: str) -> str:
    """Return the digest of a secret as the file holds it.

    Args:
        salt: The 16 random bytes in hex.
        secret: Any text, as a client sent it.
    """
    return digest_hex(in_domain("api-key/1", bytes.fromhex(salt)), secret.encode("utf-8", "surrogatepass"))


def read_key_file(path: Path, operator: Peer) -> KeyFile:
    """Read the file and check its signature before its content.

    Raises:
        KeyFileError: It is missing, too large, malformed, or not signed by the operator.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise KeyFileError(f"{path}: cannot be read ({exc.strerror}); phalanx keys create makes it") from exc
    if len(data) > _MAX_FILE_BYTES:
        raise KeyFileError(f"{path}: expected a file of at most {_MAX_FILE_BYTES} bytes")
    try:
        envelope = _Envelope.model_validate(parse_canonical(data))
        statement = canonical_json(envelope.statement)
        operator.verify_signature(bytes.fromhex(envelope.signature), in_domain(_DOMAIN, statement))
        content = KeyFile.model_validate_json(statement)
    except (ValueError, SignatureError) as exc:
        # a validation error would quote digests, and is a ValueError
        reason = "its content is malformed" if isinstance(exc, ValidationError) else str(exc)
        raise KeyFileError(
            f"{path}: is not the file that {operator.name} signed ({reason}); put the operator's last file back"
        ) from exc
    if len({record.key_id for record in content.keys}) != len(content.keys):
        raise KeyFileError(f"{path}: holds one key twice; put the operator's last file back")
    return content


def write_key_file(path: Path, operator: Identity, content: KeyFile) -> None:
    """Sign and write the file in the place of an older one, at once and durably."""
    statement = content.model_dump(mode="json")
    signature = operator.sign_data(in_domain(_DOMAIN, canonical_json(statement))).hex()
    # a server of another user reads it by its group
    replace_file(path, canonical_json({"signature": signature, "statement": statement}), 0o640)
