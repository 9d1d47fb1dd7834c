"""What an insider does to what it sends: small, readable values, so that a schedule can be read and written by hand."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from phalanx.security.crypto import Identity
from phalanx.transport import HeaderFields, SignedHeader, sign_header


@dataclass(frozen=True)
class Raw:
    """A body as it goes over the wire, well-formed or not; stands where a parsed message would."""

    kind: str
    body: dict[str, Any]

    def model_dump(self, mode):
        return self.body


@dataclass
class Known:
    """What an insider has seen: every header it got or signed, in this session and in an earlier one.

    Attributes:
        identity: What it signs with.
        headers: In order, with their payloads.
        earlier: The same of an earlier session with the same certificates.
        allies: What its league has committed to, by kind and stage.
    """

    identity: Identity | None = None
    headers: list[tuple[SignedHeader, bytes]] = field(default_factory=list)
    earlier: Sequence[tuple[SignedHeader, bytes]] = ()
    allies: dict[tuple[str, Any], dict[str, Any]] = field(default_factory=dict)

    def of_kind(self, kind, *, earlier=False):
        """Headers of one kind, the newest first; all where there is none of it."""
        found = self.earlier if earlier else self.headers
        return [entry for entry in reversed(found) if entry[0].fields.kind == kind] or list(found)


def signed(header: SignedHeader) -> dict[str, str]:
    """A header as others pass it on."""
    return {"header": header.header_bytes.decode(), "signature": header.signature.hex()}


# --- a value instead of another one -------------------------------------------------------------------


@dataclass(frozen=True)
class Put:
    """This very value."""

    value: Any

    def __call__(self, old, known):
        return deepcopy(self.value)


@dataclass(frozen=True)
class Text:
    """One character many times."""

    character: str
    times: int

    def __call__(self, old, known):
        return self.character * self.times


@dataclass(frozen=True)
class Nested:
    """Lists in lists."""

    depth: int

    def __call__(self, old, known):
        value = []
        for _ in range(self.depth):
            value = [value]
        return value


@dataclass(frozen=True)
class Plus:
    """A little more or less."""

    amount: int

    def __call__(self, old, known):
        return old + self.amount if isinstance(old, int | float) else old


@dataclass(frozen=True)
class Times:
    """Much more or less, or the contrary."""

    factor: float

    def __call__(self, old, known):
        return old * self.factor if isinstance(old, int | float) else old


@dataclass(frozen=True)
class Without:
    """A list or an object without one of its entries."""

    which: int

    def __call__(self, old, known):
        if isinstance(old, dict) and old:
            gone = sorted(old)[self.which % len(old)]
            return {key: value for key, value in old.items() if key != gone}
        if isinstance(old, list) and old:
            return [value for n, value in enumerate(old) if n != self.which % len(old)]
        return old


@dataclass(frozen=True)
class Many:
    """A list or an object with its entries again and again."""

    times: int

    def __call__(self, old, known):
        if isinstance(old, dict) and old:
            value = old[min(old)]
            return {**old, **{str(n): value for n in range(self.times)}}
        return old * self.times if isinstance(old, list) else old


@dataclass(frozen=True)
class Backwards:
    """A list in the opposite order, an object with its values exchanged."""

    def __call__(self, old, known):
        if isinstance(old, dict):
            return dict(zip(old, reversed(list(old.values())), strict=True))
        return old[::-1] if isinstance(old, list) else old


@dataclass(frozen=True)
class Renamed:
    """An object with an entry that has another name, once or many times over."""

    name: str
    times: int = 1

    def __call__(self, old, known):
        if not isinstance(old, dict) or not old:
            return old
        first = min(old)
        return {self.name * self.times if key == first else key: value for key, value in old.items()}


@dataclass(frozen=True)
class Passed:
    """Another party's signed header: the `nth` newest of a kind, of this session or an earlier one.

    With `twin`, the one that says the same as the header in its place, of whatever kind that is, where there is one.
    """

    kind: str
    nth: int = 0
    earlier: bool = False
    twin: bool = False

    def __call__(self, old, known):
        choice = known.of_kind(self.kind, earlier=self.earlier)
        if self.twin and isinstance(old, dict):
            every = known.earlier if self.earlier else known.headers
            choice = [entry for entry in reversed(every) if _is_twin(entry[0], old.get("header"))] or choice
        return signed(choice[self.nth % len(choice)][0]) if choice else old


@dataclass(frozen=True)
class Forged:
    """A header that the insider has signed itself, which says what the one in its place says but for one field."""

    name: str
    value: Any

    def __call__(self, old, known):
        try:
            fields = SignedHeader(old["header"].encode(), b"").fields
            values = {key: getattr(fields, key) for key in HeaderFields.__slots__}
            if self.name in values["body"]:
                values["body"] = {**values["body"], self.name: self.value}
            else:
                values = {**values, self.name: self.value}
            return signed(sign_header(known.identity, HeaderFields(**values)))
        except Exception:  # noqa: BLE001 - what cannot be forged stays
            return old


@dataclass(frozen=True)
class Allys:
    """What the league has said about that stage in a message of this kind, in a field of this name."""

    kind: str
    name: str

    def __call__(self, old, known):
        found = [body[self.name] for (kind, _), body in known.allies.items() if kind == self.kind and self.name in body]
        return found[-1] if found else old


def _is_twin(header, text):
    try:
        other = SignedHeader(text.encode(), b"").fields
    except Exception:  # noqa: BLE001 - whatever it is, it has no twin
        return False
    mine = header.fields
    same = (mine.kind, mine.sender, mine.receiver, mine.body) == (other.kind, other.sender, other.receiver, other.body)
    return same and mine.payload_digest != other.payload_digest


# --- payloads -----------------------------------------------------------------------------------------

PAYLOADS = {
    "none": lambda raw: b"",
    "short": lambda raw: raw[: len(raw) // 2],
    "odd": lambda raw: raw[:-1],
    "long": lambda raw: raw + bytes(64),
    "zero": lambda raw: bytes(len(raw)),
    "negated": lambda raw: bytes(byte ^ (0x80 if n % 4 == 3 else 0) for n, byte in enumerate(raw)),
    "one bit": lambda raw: bytes([raw[0] ^ 1]) + raw[1:] if raw else raw,
    "not a number": lambda raw: b"\x00\x00\xc0\x7f" + raw[4:] if len(raw) >= 4 else raw,
    "huge": lambda raw: b"\xff\xff\x7f\x7f" * (len(raw) // 4),
    "noise": lambda raw: bytes((n * 97 + 31) % 251 for n in range(len(raw))),
}
"""Other bytes for the same message, which its sender signs."""
