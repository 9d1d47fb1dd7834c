"""Neighbouring values: what an insider puts in the place of a field's own value, by the type that the schema has."""

import json
import types
import typing
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

from acts import Alter, Path

from phalanx.config import StrictModel
from phalanx.errors import FrameError
from phalanx.pipeline.protocol import messages
from phalanx.pipeline.protocol.message import Message
from phalanx.security.crypto import Identity
from phalanx.transport import HeaderFields, SignedHeader, sign_header


def _with_subclasses(cls: type) -> list[type]:
    return [cls, *(found for each in cls.__subclasses__() for found in _with_subclasses(each))]


KINDS: dict[str, type[Message]] = {cls.kind: cls for cls in _with_subclasses(Message) if "kind" in vars(cls)}
"""Every message of a verified pipeline, by the kind of its frame."""

FAR = 1000


@dataclass
class Seen:
    """What an insider has seen and signed so far.

    Attributes:
        identity: What it signs with.
        headers: Every header that it got or signed, in order, with the payload.
        parties: Names of all parties.
        num_stages: Of the run.
        earlier: The same of an earlier session with the same certificates.
    """

    identity: Identity
    parties: tuple[str, ...]
    num_stages: int
    headers: list[tuple[SignedHeader, bytes]] = field(default_factory=list)
    earlier: Sequence[tuple[SignedHeader, bytes]] = ()

    def bodies(self, kind: str) -> list[dict[str, Any]]:
        """Bodies of one kind, the newest first."""
        return [header.fields.body for header, _ in reversed(self.headers) if header.fields.kind == kind]


Change = Callable[[Any, Seen, str], Any]
"""Makes the neighbour of a value; gets the value, what was seen, and the kind of the message."""


def _altered_text(old: Any, seen: Seen, kind: str) -> Any:
    if not isinstance(old, str) or not old:
        return "1" * 64
    return ("0" if old[0] != "0" else "1") + old[1:]


def _older(name: Path) -> Callable[[Any, Seen, str], Any]:
    def change(old: Any, seen: Seen, kind: str) -> Any:
        values = [_value_at(body, name) for body in seen.bodies(kind)]
        return next((value for value in values if value not in (None, old)), old)

    return change


def _value_at(body: Any, path: Path) -> Any:
    for name in path:
        here = key_of(body, name)
        if here is None:
            return None
        body = body[here]
    return body


def key_of(body: Any, name: str | int) -> Any:
    """The key of a place in a list or an object; a number stands for any entry, counted round and round."""
    if isinstance(name, str):
        return name if isinstance(body, dict) and name in body else None
    if not body:
        return None
    if isinstance(body, dict):
        return sorted(body)[name % len(body)]
    return name % len(body) if isinstance(body, list) else None


def _other_party(old: Any, seen: Seen, kind: str) -> Any:
    return next(name for name in (*seen.parties, "owner") if name != old)


def _other_header(old: Any, seen: Seen, kind: str) -> Any:
    """Another header that was signed by the same party, about another message of the same kind."""
    try:
        mine = SignedHeader(old["header"].encode(), b"").fields
    except (TypeError, ValueError, KeyError, FrameError):
        return old
    others = [
        header
        for header, _ in reversed(seen.headers)
        if header.fields.kind == mine.kind
        and header.fields.sender == mine.sender
        and header.header_bytes.decode() != old["header"]
    ]
    return passed_on(others[0]) if others else old


def _header_of_other_session(old: Any, seen: Seen, kind: str) -> Any:
    """The header that says the same about the same thing in another session, about other bytes."""
    try:
        mine = SignedHeader(old["header"].encode(), b"").fields
    except (TypeError, ValueError, KeyError, FrameError):
        return old
    twins = [
        header
        for header, _ in seen.earlier
        if (header.fields.kind, header.fields.sender, header.fields.receiver, header.fields.body)
        == (mine.kind, mine.sender, mine.receiver, mine.body)
    ]
    return passed_on(twins[0]) if twins else old


def _own_header(old: Any, seen: Seen, kind: str) -> Any:
    """The same header about other bytes, signed by the insider in its sender's name."""
    try:
        fields = SignedHeader(old["header"].encode(), b"").fields
    except (TypeError, ValueError, KeyError, FrameError):
        return old
    values = {name: getattr(fields, name) for name in HeaderFields.__slots__}
    digest = _altered_text(values["payload_digest"], seen, kind)
    return passed_on(sign_header(seen.identity, HeaderFields(**values | {"payload_digest": digest})))


def passed_on(header: SignedHeader) -> dict[str, str]:
    """A header as others pass it on."""
    return {"header": header.header_bytes.decode(), "signature": header.signature.hex()}


def _contradicted(old: Any, seen: Seen, kind: str) -> Any:
    """A list with all its entries twice: first with another digest, then as they are."""
    if not isinstance(old, list) or not old:
        return old
    entries = [
        {name: _altered_text(value, seen, kind) if name == "digest" else value for name, value in entry.items()}
        if isinstance(entry, dict)
        else entry
        for entry in old
    ]
    return [*entries, *old]


def _other_key(old: Any, seen: Seen, kind: str) -> Any:
    """An object with another name for its first entry: another stage, or another direction."""
    if not isinstance(old, dict) or not old:
        return old
    first = min(old)
    turned = {"forward": "backward", "backward": "forward"}
    name = turned.get(first, str(int(first) + 1) if first.isdecimal() else _other_party(first, seen, kind))
    return {name if key == first else key: value for key, value in old.items()}


def _more(old: Any, seen: Seen, kind: str) -> Any:
    """As many entries as the schema lets in, with names that all stand for a stage."""
    if not isinstance(old, dict):
        return old
    filler = next(iter(old.values()), {"step": FAR, "weights": "1" * 64, "moments": "1" * 64})
    return {**old, **{f"{n:05d}": filler for n in range(64 - len(old))}}


NEIGHBOURS: dict[str, Change] = {
    "stale": lambda old, seen, kind: old - 1,
    "ahead": lambda old, seen, kind: old + 1,
    "far": lambda old, seen, kind: old + FAR,
    "zero": lambda old, seen, kind: 0,
    "double": lambda old, seen, kind: 2 * old if old else 1.0,
    "half": lambda old, seen, kind: old / 2 if old else 0.5,
    "altered": _altered_text,
    "absent": lambda old, seen, kind: None,
    "none": lambda old, seen, kind: {} if isinstance(old, dict) else [],
    "fewer": lambda old, seen, kind: {key: old[key] for key in sorted(old)[1:]} if isinstance(old, dict) else old[1:],
    "repeated": lambda old, seen, kind: old * 2 if isinstance(old, list) else old,
    "turned": lambda old, seen, kind: old[::-1] if isinstance(old, list) else old,
    "contradicted": _contradicted,
    "other key": _other_key,
    "more": _more,
    "flood": lambda old, seen, kind: [FAR] * 209_580 if isinstance(old, list) else "x" * 1_048_000,
    "other party": _other_party,
    "owner": lambda old, seen, kind: "owner",
    "forward": lambda old, seen, kind: "forward",
    "backward": lambda old, seen, kind: "backward",
    "not": lambda old, seen, kind: not old,
    "other header": _other_header,
    "own header": _own_header,
    "other session": _header_of_other_session,
    "text": lambda old, seen, kind: "\x1b[2J\u202e",
}
"""Every neighbour by name; "older" and values of a closed set are made where they are needed."""


@dataclass(frozen=True)
class Place:
    """A place in a body, and what belongs there; a number stands for any entry of a list or an object."""

    path: Path
    type: Any


def places(kind: str) -> list[Place]:
    """All places in the body of a message."""
    return [place for name, found in KINDS[kind].model_fields.items() for place in _inside((name,), found.annotation)]


def _inside(path: Path, found: Any) -> list[Place]:
    origin, arguments = typing.get_origin(found), typing.get_args(found)
    if origin is typing.Annotated:
        return _inside(path, arguments[0])
    if origin in (typing.Union, types.UnionType):
        some = [one for one in arguments if one is not type(None)]
        return [Place(path, type(None)), *(place for one in some for place in _inside(path, one))]
    here = [Place(path, found)]
    if origin is tuple:
        return here + _inside((*path, 0), arguments[0])
    if origin is dict:
        return here + _inside((*path, 0), arguments[1])
    if isinstance(found, type) and issubclass(found, StrictModel) and found is not messages.PassedOnHeader:
        fields = found.model_fields.items()
        return [place for name, inner in fields for place in _inside((*path, name), inner.annotation)]
    return here


def neighbours_of(place: Place) -> list[str]:
    """Names of the values that are tried in a place."""
    name, found = place.path[-1], place.type
    origin, arguments = typing.get_origin(found), typing.get_args(found)
    if found is type(None):
        return ["absent"]
    if found is messages.PassedOnHeader:
        return ["other header", "own header", "other session", "older", "text"]
    if origin is Literal:
        return [f'="{one}"' if isinstance(one, str) else f"={one}" for one in arguments]
    if origin is tuple:
        return ["none", "fewer", "repeated", "turned", "contradicted", "flood"]
    if origin is dict:
        return ["none", "fewer", "other key", "more"]
    if found is str:
        return ["older", "other party", "owner"] if name in ("about", "holder", "shadow") else ["altered", "older"]
    if found is float:
        return ["double", "half", "zero"]
    if found is int:
        return ["stale", "ahead", "far", "text"] if name in ("epoch", "step") else ["stale", "ahead"]
    return ["not"] if found is bool else []


def altered(kind: str, body: dict[str, Any], alters: tuple[Alter, ...], seen: Seen) -> dict[str, Any]:
    """A body with neighbouring values; a place that it does not have is left out."""
    body = deepcopy(body)
    for alter in alters:
        parent = _value_at(body, alter.path[:-1])
        here = None if parent is None else key_of(parent, alter.path[-1])
        if here is None:
            continue
        old = parent[here]
        if alter.value.startswith("="):
            parent[here] = json.loads(alter.value[1:])
            continue
        change = _older(alter.path) if alter.value == "older" else NEIGHBOURS[alter.value]
        if old is not None or alter.value in ("absent", "other party", "owner", "altered", "older"):
            parent[here] = change(old, seen, kind)
    return body


def template(kind: str, now: dict[str, Any]) -> dict[str, Any]:
    """A body of a kind with what belongs to this point of the run, and hardly anything else."""
    return {
        name: deepcopy(now[name]) if name in now else _empty(found.annotation)
        for name, found in KINDS[kind].model_fields.items()
    }


def _empty(found: Any) -> Any:
    origin, arguments = typing.get_origin(found), typing.get_args(found)
    if origin is typing.Annotated:
        return _empty(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return None if type(None) in arguments else _empty(arguments[0])
    if origin is Literal:
        return arguments[0]
    if origin in (tuple, dict):
        return [] if origin is tuple else {}
    if isinstance(found, type) and issubclass(found, StrictModel):
        return {name: _empty(inner.annotation) for name, inner in found.model_fields.items()}
    return {int: 0, float: 0.0, str: "0" * 64, bool: False}.get(found)
