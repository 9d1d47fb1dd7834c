"""What one site can say in place of an honest reply: every field of every schema, set to every neighbouring value.

Neighbours are another site's value, the site's own of the round before, one ahead, one behind, altered, repeated,
absent, and what no honest site says. A signed statement inside a reply is changed likewise, and signed by the site's
own key.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rounds_scene import IDENTITIES
from safetensors.torch import load, save

from phalanx.config import canonical_json
from phalanx.federated.admission import UpdateHeader
from phalanx.federated.carriers import messages as m
from phalanx.federated.carriers.carrier import CarriedReply, SentOrder
from phalanx.federated.rounds import keepers
from phalanx.security.aggregate import messages as sums
from phalanx.security.crypto import digest_hex, in_domain
from phalanx.security.homomorphic import MODULUS

LENGTH = 16
"""Values of an update."""
ABSENT = object()
"""A field that is left out."""


@dataclass
class View:
    """What an attacker has at a point.

    Attributes:
        order: The order that it answers.
        own: Its honest reply.
        other: The honest reply of another site at the same point.
        stale: Its own of the round before; None in the first one.
        others: Of all sites.
    """

    order: SentOrder
    own: CarriedReply
    other: CarriedReply
    stale: CarriedReply | None
    others: dict[str, CarriedReply] = field(default_factory=dict)


Act = Callable[[View], CarriedReply | None]


# --- neighbouring values


def neighbours(own: Any, other: Any, stale: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values beside the honest one of a field."""
    found: list[tuple[str, Any]] = [("other", other), ("stale", stale), ("absent", ABSENT), ("null", None)]
    if isinstance(own, bool | int | float):
        found += [("ahead", own + 1), ("behind", own - 1), ("zero", 0), ("negative", -1), ("huge", 2**52)]
        if isinstance(own, float):
            found += [("nan", math.nan), ("infinite", math.inf)]
    elif isinstance(own, str):
        altered = own[:-1] + ("1" if own[-1:] == "0" else "0")
        found += [("altered", altered), ("repeated", own + own), ("empty", ""), ("zeros", "0" * len(own))]
    elif isinstance(own, list):
        found += [("cut", own[:-1]), ("repeated", own + own), ("reversed", own[::-1]), ("empty", [])]
    elif isinstance(own, dict) and own:
        first = sorted(own)[0]
        found += [("empty", {}), ("cut", {key: own[key] for key in own if key != first})]
        found += [("altered", {**own, first: "0" * len(str(own[first]))})]
    seen = [own]
    for name, value in found:
        if name == "stale" and stale is None:
            continue
        if not any(value is one or (type(value) is type(one) and value == one) for one in seen):
            seen.append(value)
            yield name, value


def with_field(body: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return a body with one field set or left out."""
    rest = {key: one for key, one in body.items() if key != name}
    return rest if value is ABSENT else {**rest, name: value}


def signed(body: dict[str, Any], actor: str, domain: str) -> bytes:
    """Return a statement in its one form, signed by the attacker's own key."""
    signature = IDENTITIES[actor].sign_data(in_domain(domain, _json(body))).hex()
    return _json({"body": body, "signature": signature})


def _json(body: Any) -> bytes:
    try:
        return canonical_json(body)
    except (ValueError, TypeError):
        return json.dumps(body).encode()


# --- where a statement is inside a reply


@dataclass(frozen=True)
class Statements:
    """The signed statements inside one kind of reply.

    Attributes:
        fields: Of the schema.
        domain: That its signature is in.
        read: Returns the bodies of a reply's statements.
        write: Returns a reply with other statements.
    """

    fields: tuple[str, ...]
    domain: str
    read: Callable[[CarriedReply], list[dict[str, Any]]]
    write: Callable[[CarriedReply, list[bytes]], CarriedReply]


def _of_payload(schema, domain: str) -> Statements:
    return Statements(
        tuple(schema.model_fields),
        domain,
        lambda reply: [json.loads(reply.payload)["body"]],
        lambda reply, found: CarriedReply(reply.site, reply.kind, reply.body, found[0]),
    )


def _of_field(schema, domain: str, name: str) -> Statements:
    return Statements(
        tuple(schema.model_fields),
        domain,
        lambda reply: [json.loads(reply.body[name])["body"]],
        lambda reply, found: CarriedReply(
            reply.site, reply.kind, reply.body | {name: found[0].decode()}, reply.payload
        ),
    )


def _of_items(schema, domain: str) -> Statements:
    def write(reply: CarriedReply, found: list[bytes]) -> CarriedReply:
        items = keepers.unpack_items(reply.payload, 100)
        payload = keepers.pack_items([(header, data) for header, (_, data) in zip(found, items, strict=True)])
        return CarriedReply(reply.site, reply.kind, reply.body, payload)

    return Statements(
        tuple(schema.model_fields),
        domain,
        lambda reply: [json.loads(header)["body"] for header, _ in keepers.unpack_items(reply.payload, 100)],
        write,
    )


def _boxes(reply: CarriedReply, found: list[bytes]) -> CarriedReply:
    payload = _json({"kind": "boxes", "boxes": [json.loads(one) for one in found]})
    return CarriedReply(reply.site, reply.kind, reply.body, payload)


_KEPT = keepers.KeyHeader.model_fields["version"].default
STATEMENTS: dict[tuple[str, str, str], Statements] = {
    ("plain", "train", ""): _of_field(UpdateHeader, "federated-update/1", "header"),
    ("masked", "sum", "join"): _of_payload(sums.Advert, "aggregate-advert-signature/1"),
    ("masked", "sum", "share"): Statements(
        tuple(sums.ShareBox.model_fields),
        "aggregate-box-signature/1",
        lambda reply: [one["body"] for one in json.loads(reply.payload)["boxes"]],
        _boxes,
    ),
    ("masked", "sum", "mask"): _of_field(sums.Deposit, "aggregate-deposit-signature/1", "message"),
    ("masked", "sum", "consent"): _of_payload(sums.Consent, "aggregate-consent-signature/1"),
    ("masked", "sum", "release"): _of_payload(sums.ShareRelease, "aggregate-release-signature/1"),
    ("homomorphic", "sum", "key"): _of_items(keepers.KeyHeader, f"homomorphic-key/{_KEPT}"),
    ("homomorphic", "sum", "encrypt"): _of_items(keepers.PartHeader, f"homomorphic-part/{_KEPT}"),
}
STATEMENTS["rule", "train", ""] = STATEMENTS["plain", "train", ""]


# --- acts


def reply_acts() -> Iterator[tuple[str, Act]]:
    """Acts on the reply itself: each kind instead of it, each field of each, and no reply at all."""
    yield "silence", lambda view: None
    for what, taken in (("another site", lambda view: view.other), ("the round before", lambda view: view.stale)):
        yield f"all of {what}", taken
        yield f"all of {what} but the ticket", lambda view, taken=taken: _with_ticket(taken(view), view)
    samples: dict[str, dict[str, Any]] = {
        "trained": {"loss": 1.0, "num_targets": 1, "samples": 1, "scaled": 1.0, "train_s": 0.0},
        "summed": {},
        "measured": {"loss": 1.0, "num_targets": 1},
        "fault": {"reason": "refused", "culprit": "site-1"},
    }
    for kind in m.REPLIES:
        body = samples[kind]
        yield (
            f"{kind} instead",
            lambda view, kind=kind, body=body: CarriedReply("", kind, body | {"ticket": view.own.body["ticket"]}, b""),
        )


def _with_ticket(reply: CarriedReply | None, view: View) -> CarriedReply | None:
    body = {} if reply is None else {**reply.body, "ticket": view.own.body["ticket"]}
    return reply and CarriedReply("", reply.kind, body, reply.payload)


def field_acts(kind: str, sample: CarriedReply) -> Iterator[tuple[str, Act]]:
    """Acts on each field of a reply, and on its payload."""
    for name in m.REPLIES[kind].model_fields:
        for what, _ in neighbours(sample.body[name], _unlike(sample.body[name]), _unlike(sample.body[name])):

            def act(view: View, name: str = name, what: str = what) -> CarriedReply:
                stale = None if view.stale is None else view.stale.body.get(name)
                values = dict(neighbours(view.own.body[name], view.other.body.get(name), stale))
                value = values.get(what, view.own.body[name])
                return CarriedReply("", view.own.kind, with_field(view.own.body, name, value), view.own.payload)

            yield f"{name} {what}", act
    for what, change in PAYLOADS.items():
        yield (
            f"payload {what}",
            lambda view, change=change: CarriedReply("", view.own.kind, view.own.body, change(view)),
        )


def _flipped(data: bytes, place: float) -> bytes:
    at = min(len(data) - 1, int(len(data) * place))
    return data[:at] + bytes([data[at] ^ 0x80]) + data[at + 1 :] if data else b"\x80"


PAYLOADS: dict[str, Callable[[View], bytes]] = {
    "other": lambda view: view.other.payload,
    "stale": lambda view: view.own.payload if view.stale is None else view.stale.payload,
    "absent": lambda view: b"",
    "cut": lambda view: view.own.payload[:-1],
    "longer": lambda view: view.own.payload + b"\0",
    "repeated": lambda view: view.own.payload * 2,
    "altered at first": lambda view: _flipped(view.own.payload, 0.0),
    "altered in the middle": lambda view: _flipped(view.own.payload, 0.5),
    "altered at last": lambda view: _flipped(view.own.payload, 1.0),
}


def _unlike(value: Any) -> Any:
    """Return a value of the same type that differs: neighbours have names before other messages are there."""
    if isinstance(value, bool | int | float):
        return value + 7
    if isinstance(value, str) and value:
        return value[:-1] + ("e" if value[-1] == "f" else "f")
    return {"": ""} if isinstance(value, dict) else [object()]


def statement_acts(mode: str, actor: str, point: tuple[str, str], sample: CarriedReply) -> Iterator[tuple[str, Act]]:
    """Acts on each field of the signed statements in a reply, in the first of them and in all."""
    statements = STATEMENTS.get((mode, *point))
    if statements is None:
        return
    bodies = statements.read(sample)
    for name in statements.fields:
        own = bodies[0].get(name)
        for what, _ in neighbours(own, _unlike(own), _unlike(own)):
            for share in ("first", "all") if len(bodies) > 1 else ("all",):

                def act(view: View, name: str = name, what: str = what, share: str = share) -> CarriedReply:
                    return _with_statements(statements, view, actor, name, what, share == "first")

                yield f"{statements.domain.split('/')[0]}.{name} {what} in {share}", act


def _with_statements(statements, view: View, actor: str, name: str, what: str, is_first: bool) -> CarriedReply:
    try:
        own, other = statements.read(view.own), statements.read(view.other)
        stale = statements.read(view.stale) if view.stale is not None else []
    except (ValueError, KeyError):
        return view.own
    bodies = []
    for at, body in enumerate(own):
        beside = [one[min(at, len(one) - 1)].get(name) if one else None for one in (other, stale)]
        values = dict(neighbours(body.get(name), *beside))
        keeps = (is_first and at) or what not in values
        bodies.append(body if keeps else with_field(body, name, values[what]))
    return statements.write(view.own, [signed(body, actor, statements.domain) for body in bodies])


def value_acts(mode: str, actor: str, point: tuple[str, str]) -> Iterator[tuple[str, Act]]:
    """Acts on what a statement is about, with a statement of the attacker that is true of it."""
    if mode in ("plain", "rule") and point[0] == "train":
        for what, change in TENSORS.items():
            yield f"values {what}", lambda view, change=change: _signed_values(view, actor, change(view))
    if mode == "masked" and point[1] == "mask":
        for what, change in WORDS.items():
            yield f"masked values {what}", lambda view, change=change: signed_words(view, actor, change)
    if mode == "homomorphic" and point[1] == "encrypt":
        for what in ("copied", "subtracted"):
            yield f"part {what}", lambda view, what=what: derived_parts(view, actor, what)
        yield "parts exchanged", lambda view: _signed_parts(view.own, actor, [1, 0])
        yield "one part for all", lambda view: _signed_parts(view.own, actor, [0, 0])


TENSORS: dict[str, Callable[[View], bytes]] = {
    "of another site": lambda view: view.other.payload,
    "not a number": lambda view: _scaled(view, math.nan),
    "infinite": lambda view: _scaled(view, math.inf),
    "none": lambda view: _scaled(view, 0.0),
    "beyond the norm": lambda view: _scaled(view, 1e9),
    "of another shape": lambda view: save({"w": torch.ones(LENGTH + 1)}),
    "of another type": lambda view: save({"w": torch.ones(LENGTH, dtype=torch.float64)}),
    "of another name": lambda view: save({"v": torch.ones(LENGTH)}),
    "no tensors": lambda view: b"\xff" * 64,
}
WORDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "first": lambda words: words + np.eye(1, len(words), 0, dtype=np.uint32)[0] * np.uint32(2**30),
    "weight": lambda words: words + np.eye(1, len(words), len(words) - 1, dtype=np.uint32)[0],
    "all": lambda words: words * np.uint32(5) + np.uint32(2**29),
    "short": lambda words: words[:-1],
}


def _scaled(view: View, factor: float) -> bytes:
    return save({name: one * factor for name, one in load(view.own.payload).items()})


def _signed_values(view: View, actor: str, values: bytes) -> CarriedReply:
    body = json.loads(view.own.body["header"])["body"] | {"values": digest_hex(values)}
    header = signed(body, actor, "federated-update/1").decode()
    return CarriedReply("", view.own.kind, view.own.body | {"header": header}, values)


def signed_words(view: View, actor: str, change: Callable[[np.ndarray], np.ndarray]) -> CarriedReply:
    words = np.ascontiguousarray(change(np.frombuffer(view.own.payload, "<u4").copy()), "<u4").tobytes()
    body = json.loads(view.own.body["message"])["body"] | {"payload": digest_hex(words)}
    message = signed(body, actor, "aggregate-deposit-signature/1").decode()
    return CarriedReply("", view.own.kind, view.own.body | {"message": message}, words)


def _signed_parts(reply: CarriedReply, actor: str, order: list[int], data: list[bytes] | None = None) -> CarriedReply:
    items = keepers.unpack_items(reply.payload, 2)
    data = [items[at][1] for at in order] if data is None else data
    found = []
    for (header, _), part in zip(items, data, strict=True):
        body = json.loads(header)["body"] | {"part": digest_hex(part)}
        found.append((signed(body, actor, f"homomorphic-part/{_KEPT}"), part))
    return CarriedReply("", reply.kind, reply.body, keepers.pack_items(found))


def derived_parts(view: View, actor: str, what: str) -> CarriedReply:
    """Make parts of the other sites' ciphertexts: a copy of one, or all of the others subtracted but one."""
    keys = [public for _, public in keepers.unpack_items(view.order.payload, 2)]
    names = [name for name in sorted(view.others) if name != actor]
    taken = [
        keepers.unpack_items(view.others[name].payload, 2) for name in (names if what == "subtracted" else names[1:2])
    ]
    own = keepers.unpack_items(view.own.payload, 2)
    found = []
    for at, public in enumerate(keys):
        parts = [items[at][1] for items in taken]
        try:
            part = derived_part(public, own[at][1], parts[1:] if what == "subtracted" else parts, what == "subtracted")
        except (ValueError, RuntimeError, KeyError, TypeError):
            # no ciphertexts to see: the attacker sends what it saw
            part = parts[0]
        found.append(part)
    return _signed_parts(view.own, actor, [0, 1], found)


def derived_part(public: bytes, own: bytes, others: list[bytes], is_subtracted: bool) -> bytes:
    """Return a part in the attacker's name that is the sum of other sites' ciphertexts, or its opposite."""
    import tenseal

    context = tenseal.context_from(public)
    header, blocks = _blocks(own)
    found = []
    for at in range(len(blocks)):
        vectors = [tenseal.bfv_vector_from(context, _blocks(part)[1][at]) for part in others]
        # as many ones in the last slot as a single client has; a product would cost what is left of the noise
        mark = [0] * vectors[0].size()
        mark[-1] = 1 + len(others) if is_subtracted else 1 - len(others)
        total = tenseal.bfv_vector(context, [one % MODULUS for one in mark])
        for vector in vectors:
            total = total - vector if is_subtracted else total + vector
        found.append(total.serialize())
    said = canonical_json({**header, "sizes": [len(one) for one in found]})
    return len(said).to_bytes(4, "big") + said + b"".join(found)


def _blocks(part: bytes) -> tuple[dict[str, Any], list[bytes]]:
    size = int.from_bytes(part[:4], "big")
    header, at = json.loads(part[4 : 4 + size]), 4 + size
    blocks = []
    for length in header["sizes"]:
        blocks.append(part[at : at + length])
        at += length
    return header, blocks
