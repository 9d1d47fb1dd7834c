"""The messages of a secure sum: strict, bounded, canonical, and each signed for one round.

server -> client   terms
client -> server   advert      its keys of this round                            (signed)
server -> client   adverts     of all that came
client -> server   boxes       shares of its secrets, one sealed box a neighbour (signed)
server -> client   delivery    names of those that shared, and the boxes for this client
client -> server   deposit     its masked values                                 (signed)
server -> client   deposits    of all that came, without the values
client -> server   consent     these are the clients in the sum                  (signed)
server -> client   consents    of more than two thirds
client -> server   release     shares: of a client in the sum of one secret, of another of the other one (signed)
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Generic, Literal, TypeVar, cast

from pydantic import Field, ValidationError

from phalanx.config import StrictModel, canonical_json
from phalanx.errors import AggregationError, SignatureError
from phalanx.security.aggregate.shamir import SHARE_BYTES
from phalanx.security.aggregate.terms import MAX_CLIENTS, Hex32, PartyName, SumTerms
from phalanx.security.crypto import Identity, Peer, digest_hex, in_domain


class SumRefusal(StrEnum):
    """Every reason of an `AggregationError`; the values appear in messages and logs."""

    MALFORMED = "malformed"
    FOREIGN_ROUND = "foreign_round"
    FOREIGN_TERMS = "foreign_terms"
    FOREIGN_PARTY = "foreign_party"
    SMALL_COHORT = "small_cohort"
    TOO_FEW = "too_few"
    OTHER_VIEW = "other_view"
    NOT_INCLUDED = "not_included"
    REPEATED_ROUND = "repeated_round"
    BAD_SHARE = "bad_share"
    BAD_INPUT = "bad_input"
    OUT_OF_PHASE = "out_of_phase"


SEALED_BYTES = 2 * SHARE_BYTES + 16
_BYTES_A_CLIENT = 1024
_BYTES_A_MESSAGE = 4096
Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{128}\z")]
_Share = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * SHARE_BYTES}}}\z")]
_Sealed = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * SEALED_BYTES}}}\z")]


class SumMessage(StrictModel):
    """A body that a client signs."""

    kind: str
    terms: Hex32
    sender: PartyName


class Advert(SumMessage):
    """A client's keys of one round.

    Attributes:
        box_key: X25519 public key for the boxes with shares.
        mask_key: X25519 public key that makes the masks.
    """

    kind: Literal["advert"] = "advert"
    box_key: Hex32
    mask_key: Hex32
    seed_digest: Hex32


class ShareBox(SumMessage):
    """A sealed box with a neighbour's shares of a client's two secrets.

    Attributes:
        adverts: Digest of the adverts that the client saw.
        key_share_digest: Digest of the share of the client's private mask key.
    """

    kind: Literal["box"] = "box"
    adverts: Hex32
    holder: PartyName
    sealed: _Sealed
    key_share_digest: Hex32
    seed_share_digest: Hex32


class Deposit(SumMessage):
    """A client's statement about the masked values that it sends beside it.

    Attributes:
        view: Digest of the adverts and of the sharers' names that this client received.
    """

    kind: Literal["deposit"] = "deposit"
    view: Hex32
    payload: Hex32


class Consent(SumMessage):
    """A client's word that it gives shares out for this set of clients and no other.

    Attributes:
        included: Digest of view, names and payloads of those in the sum.
    """

    kind: Literal["consent"] = "consent"
    included: Hex32


class ShareRelease(SumMessage):
    """The shares that take the masks off.

    Attributes:
        included: The clients of the sum, as in the consent.
        key_shares: Shares of the mask keys of neighbours that shared and are not in the sum.
        seed_shares: Shares of the seeds of neighbours in the sum.
    """

    kind: Literal["release"] = "release"
    included: Hex32
    key_shares: dict[PartyName, _Share]
    seed_shares: dict[PartyName, _Share]


Body = TypeVar("Body", bound=SumMessage)


class SignedMessage(StrictModel, Generic[Body]):
    """A body with its sender's signature."""

    body: Body
    signature: Hex64


_Few = Field(max_length=MAX_CLIENTS)


class SignedTerms(StrictModel):
    """The terms with the server's signature."""

    body: SumTerms
    signature: Hex64


class Adverts(StrictModel):
    """The adverts that came in time."""

    kind: Literal["adverts"] = "adverts"
    adverts: Annotated[tuple[SignedMessage[Advert], ...], _Few]


class Boxes(StrictModel):
    """A client's boxes."""

    kind: Literal["boxes"] = "boxes"
    boxes: Annotated[tuple[SignedMessage[ShareBox], ...], _Few]


class ShareDelivery(StrictModel):
    """The names of all that shared, and the boxes for one of them."""

    kind: Literal["delivery"] = "delivery"
    sharers: Annotated[tuple[PartyName, ...], _Few]
    boxes: Annotated[tuple[SignedMessage[ShareBox], ...], _Few]


class Deposits(StrictModel):
    """The deposits that came in time, without their values."""

    kind: Literal["deposits"] = "deposits"
    deposits: Annotated[tuple[SignedMessage[Deposit], ...], _Few]


class Consents(StrictModel):
    """The consents that came in time."""

    kind: Literal["consents"] = "consents"
    consents: Annotated[tuple[SignedMessage[Consent], ...], _Few]


Message = TypeVar("Message", bound=StrictModel)


def encode_message(message: StrictModel) -> bytes:
    """Return a message's one form."""
    return canonical_json(message.model_dump(mode="json"))


def decode_message(data: bytes, kind: type[Message], clients: int = MAX_CLIENTS) -> Message:
    """Read a message that must be in its one form."""
    if len(data) > (limit := _BYTES_A_MESSAGE + _BYTES_A_CLIENT * clients):
        raise AggregationError(SumRefusal.MALFORMED, f"{len(data)} bytes, at most {limit}")
    try:
        message = kind.model_validate_json(data)
        is_canonical = encode_message(message) == data
    except ValidationError as exc:
        error = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, error["loc"]))[:80]
        raise AggregationError(SumRefusal.MALFORMED, f"{kind.__name__}: {place}: {error['msg'][:200]}") from exc
    if not is_canonical:
        raise AggregationError(SumRefusal.MALFORMED, f"{kind.__name__}: is not in canonical form")
    return message


def sign_message(body: Body, identity: Identity) -> SignedMessage[Body]:
    """Sign a body."""
    signature = identity.sign_data(_signed_bytes(body.kind, body))
    form = cast("type[SignedMessage[Body]]", SignedMessage.__class_getitem__(type(body)))
    return form(body=body, signature=signature.hex())


def check_signed(message: SignedMessage[Body], terms: SumTerms, peers: dict[str, Peer]) -> Body:
    """Return the body of a message after its signature and its round were checked."""
    body = message.body
    # a statement for other terms blames nobody: it may be of another sum, and brought by another party
    if body.terms != terms.terms_digest:
        raise AggregationError(SumRefusal.FOREIGN_TERMS, f"{body.sender}: signed for other terms")
    if body.sender not in peers:
        raise AggregationError(SumRefusal.FOREIGN_PARTY, f"{body.sender}: is not in the cohort")
    check_signature(message.signature, body, peers[body.sender])
    return body


def check_signature(signature: str, body: SumMessage, peer: Peer) -> None:
    """Return when a client signed a body."""
    try:
        peer.verify_signature(bytes.fromhex(signature), _signed_bytes(body.kind, body))
    except SignatureError as exc:
        raise AggregationError(SumRefusal.FOREIGN_PARTY, f"{peer.name}: the signature does not match") from exc


def sign_terms(terms: SumTerms, server: Identity) -> bytes:
    """Return the terms as the server sends them."""
    return encode_message(SignedTerms(body=terms, signature=server.sign_data(_signed_bytes("terms", terms)).hex()))


def read_terms(data: bytes, server: Peer) -> SumTerms:
    """Read the terms of a round."""
    message = decode_message(data, SignedTerms)
    try:
        server.verify_signature(bytes.fromhex(message.signature), _signed_bytes("terms", message.body))
    except SignatureError as exc:
        raise AggregationError(SumRefusal.FOREIGN_PARTY, f"terms: {server.name} did not sign them") from exc
    return message.body


def digest_of(domain: str, *parts: object) -> str:
    """Return the digest of what several parties must see alike."""
    return digest_hex(in_domain(domain, canonical_json(parts)))


def adverts_digest(terms: SumTerms, adverts: Sequence[SignedMessage[Advert]]) -> str:
    """Return the digest of all adverts."""
    return digest_of("aggregate-adverts/1", terms.terms_digest, [advert.model_dump(mode="json") for advert in adverts])


def view_digest(terms: SumTerms, adverts: str, sharers: Sequence[str]) -> str:
    """Return the digest of the adverts and sharers that a client received before it masked its values."""
    return digest_of("aggregate-view/1", terms.terms_digest, adverts, list(sharers))


def included_digest(terms: SumTerms, view: str, payloads: dict[str, str]) -> str:
    """Return the digest of the clients in the sum and of their values."""
    return digest_of("aggregate-included/1", terms.terms_digest, view, payloads)


def share_digest(kind: str, terms: SumTerms, dealer: str, holder: str, share: str) -> str:
    """Return the digest that binds a share to its dealer and its holder."""
    return digest_of("aggregate-share/1", kind, terms.terms_digest, dealer, holder, share)


def seed_digest(terms: SumTerms, name: str, seed: bytes) -> str:
    """Return the digest that binds a seed to the client that drew it."""
    return digest_of("aggregate-seed/1", terms.terms_digest, name, seed.hex())


def _signed_bytes(kind: str, body: StrictModel) -> bytes:
    return in_domain(f"aggregate-{kind}-signature/1", canonical_json(body.model_dump(mode="json")))
