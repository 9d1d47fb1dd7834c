"""Every message, every field, every type: read off the schemas, so that what is added there is driven here."""

import types
import typing
from dataclasses import dataclass
from typing import Any, Literal

from changes import Allys, Backwards, Forged, Many, Nested, Passed, Plus, Put, Renamed, Text, Times, Without
from hypothesis import strategies as st
from schedule import Path

from phalanx.config import StrictModel
from phalanx.pipeline.protocol import messages

NAMES = ["owner", "worker-1", "worker-2", "worker-3", "worker-1.2", "nobody", "", "../worker-1", "\x1b[31mworker\n"]
DIGESTS = ["0" * 64, "1" * 64, "F" * 64, "", "0" * 63, "0" * 128]
TEXTS = [
    *[Put(text) for text in (*NAMES, *DIGESTS, "é" * 70, "\u202eecnetnes", "NaN", "0", "1", "2", "-1")],
    Text("9", 5000),
    Text("x", 300_000),
    Text("\x00", 100),
]
WHOLE = [Put(n) for n in (-1, 0, 1, 2, 3, 4, 77, 2**31, 2**53, 2**63 - 1, -(2**63))] + [Plus(1), Plus(-1), Plus(2)]
REAL = [
    *[Put(x) for x in (0.0, -0.0, -1.0, -1e30, -1e308, 1e30, 1e308, 1.7976931348623157e308, 5e-324, 1e-300)],
    *[Put(x) for x in (0, -1, 2**63 - 1)],
    *[Times(x) for x in (-1.0, 0.5, 2.0, 1.0000001, 1e10)],
]
JUNK = [Put(value) for value in (None, True, -1, 1.5, "", "x", [], {}, [[]], [None], {"": {}})] + [Nested(20)]
GARBLED = [
    Put({"header": text, "signature": signature})
    for text in ("no JSON", "[]", '{"body":[]}', "[" * 1000, "\x00", "")
    for signature in ("00" * 64, "zz", "")
]


def _with_subclasses(cls: type) -> list[type]:
    return [cls, *(found for each in cls.__subclasses__() for found in _with_subclasses(each))]


KINDS: dict[str, type[messages.Message]] = {
    cls.kind: cls for cls in _with_subclasses(messages.Message) if "kind" in vars(cls)
}
FROM_OWNER = ("setup", "assign", "noise_keys", "audit", "apply", "release", "relay", "ask", "shutdown")
FROM_WORKERS = sorted(KINDS.keys() - set(FROM_OWNER))


@dataclass(frozen=True)
class Place:
    """A place in a body, and what belongs there; a number stands for any entry of a list or an object."""

    path: Path
    type: Any


def places(kind: str) -> list[Place]:
    """All places in the body of a message."""
    return [place for name, field in KINDS[kind].model_fields.items() for place in _inside((name,), field.annotation)]


def _inside(path: Path, found: Any) -> list[Place]:
    origin, arguments = typing.get_origin(found), typing.get_args(found)
    if origin is typing.Annotated:
        return _inside(path, arguments[0])
    if origin in (typing.Union, types.UnionType):
        rest = [one for one in arguments if one is not type(None)]
        return [place for one in rest for place in _inside(path, one)]
    here = [Place(path, found)]
    if origin is tuple:
        return here + [place for n in (0, 1, -1) for place in _inside((*path, n), arguments[0])]
    if origin is dict:
        return here + [place for n in (0, -1) for place in _inside((*path, n), arguments[1])]
    if isinstance(found, type) and issubclass(found, StrictModel) and found is not messages.PassedOnHeader:
        fields = found.model_fields.items()
        return here + [place for name, field in fields for place in _inside((*path, name), field.annotation)]
    return here


def headers() -> st.SearchStrategy[Any]:
    """What an insider shows as another party's signed header."""
    kinds = st.sampled_from(["tensor", "bulk", "audit", "assign", "commit", "apply", "fetched", "applied", "ready"])
    passed = st.builds(Passed, kinds, st.integers(0, 7), st.booleans())
    # the same place, link and key about another tensor, which only another session has: its name alone tells them apart
    twins = st.builds(Passed, st.just("tensor"), st.integers(0, 1), st.just(True), st.just(True))
    wrong = st.sampled_from(
        [
            *[("run", "another-run"), ("receiver", "owner"), ("receiver", "worker-2"), ("sender", "worker-2")],
            *[("payload_digest", "1" * 64), ("payload_size", 0), ("epoch", 0), ("epoch", 7), ("step", 0)],
            *[("microbatch", 0), ("source", 0), ("source", 2), ("shape", [1]), ("dtype", "float64"), ("sequence", 0)],
            *[("kind", "commit"), ("body", {})],
        ]
    )
    return passed | twins | twins | st.builds(lambda pair: Forged(*pair), wrong) | st.sampled_from(GARBLED)


def changes(found: Any) -> st.SearchStrategy[Any]:
    """What an insider puts in a place of a type."""
    origin, arguments = typing.get_origin(found), typing.get_args(found)
    lists = [Put([]), Without(0), Without(-1), Many(2), Many(500), Backwards(), Put({})]
    objects = [Put({}), Without(0), Many(3), Many(3000), Backwards(), Put([])]
    named = [Renamed(name) for name in ("0", "1", "2", "3", "77", "-1", "", "owner", "\x1b[2J", "busy")]
    named.append(Renamed("9", 5000))
    if found is messages.PassedOnHeader:
        return headers()
    if origin is Literal:
        return st.sampled_from([*map(Put, arguments), Put("nonsense")])
    if origin is tuple:
        return st.sampled_from(lists)
    if origin is dict:
        return st.sampled_from(objects + named)
    if found is str:
        return st.sampled_from([*TEXTS, Allys("commit", "gradient"), Allys("step_audited", "gradient")])
    if found is float:
        return st.sampled_from([*REAL, Allys("commit", "norm_squared")])
    return st.sampled_from(WHOLE if found is int else JUNK)


def template(kind: str) -> dict[str, Any]:
    """A body of a kind that has hardly anything in it."""
    return {name: _empty(field.annotation) for name, field in KINDS[kind].model_fields.items()}


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
        return {name: _empty(field.annotation) for name, field in found.model_fields.items()}
    return {int: 0, float: 0.0, str: "0" * 64, bool: False}.get(found)
