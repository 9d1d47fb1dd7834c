"""Every field of every message has bounds: whatever JSON can carry is refused with our error, or harmless."""

import json
import re
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

import phalanx.pipeline
from phalanx.config.text import printable_text
from phalanx.errors import FrameError, OutOfBoundsError
from phalanx.pipeline.protocol import messages
from phalanx.pipeline.protocol.greetings import Hello
from phalanx.pipeline.protocol.message import Message
from phalanx.pipeline.protocol.messages import Fault, ScreenHit, UpdateReport, parse_message
from phalanx.telemetry.phases import COSTS

KINDS = {
    cls.kind: cls
    for cls in vars(messages).values()
    if isinstance(cls, type) and issubclass(cls, Message) and hasattr(cls, "kind")
}
ENDLESS = 10**6
UNBOUNDED = {"plan"}
"""The owner's word, which is trusted; `parse_plan` reads it."""


def unbounded(annotation: Any, metadata: tuple[Any, ...] = ()) -> bool:
    """Whether a field's type lets numbers, texts or collections of any size in."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return unbounded(get_args(annotation)[0], (*metadata, *get_args(annotation)[1:]))
    if origin in (types.UnionType, Union, Literal) or annotation in (type(None), bool):
        return origin in (types.UnionType, Union) and any(unbounded(one, metadata) for one in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return any(field_is_unbounded(field) for field in annotation.model_fields.values())
    facts = [item for one in metadata for item in getattr(one, "metadata", [one])]
    limits = {type(item).__name__ for item in facts} | {key for item in facts for key in vars_of(item)}
    if annotation in (int, float):
        return not ({"Ge", "ge"} & limits and {"Le", "Lt", "le", "lt"} & limits)
    if annotation is str:
        return not ({"MaxLen", "max_length", "pattern", "AfterValidator"} & limits)
    if origin in (tuple, dict):
        parts = [one for one in get_args(annotation) if one is not Ellipsis]
        # a dict whose keys are a closed set needs no length
        closed = origin is dict and (get_origin(parts[0]) is Literal or "known_cost" in str(parts[0]))
        return not (closed or {"MaxLen", "max_length"} & limits) or any(unbounded(one) for one in parts)
    raise AssertionError(f"no rule for {annotation}")


def vars_of(item: Any) -> list[str]:
    return [key for key, value in getattr(item, "__dict__", {}).items() if value is not None]


def field_is_unbounded(field: Any) -> bool:
    return unbounded(field.annotation, tuple(field.metadata))


FIELDS = [(kind, name) for kind, cls in sorted(KINDS.items()) for name in cls.model_fields if name not in UNBOUNDED]


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_every_field_of_every_message_has_bounds(kind, name):
    assert not field_is_unbounded(KINDS[kind].model_fields[name])


def test_the_scan_finds_a_field_without_bounds():
    assert unbounded(int)
    assert unbounded(str)
    assert unbounded(tuple[int, ...])
    assert unbounded(dict[str, float])


COMMIT = {
    "epoch": 0,
    "step": 2,
    "stage": 1,
    "received": [{"header": "{}", "signature": "00"}],
    "sent": [{"direction": "forward", "microbatch": 0, "digest": "ab" * 32}],
    "norm_squared": 1.0,
    "gradient": "cd" * 32,
}
APPLIED = {
    "epoch": 0,
    "step": 2,
    "states": {"1": {"step": 3, "weights": "ab" * 32, "moments": "cd" * 32}},
    "usage": {"compute": 1.0, "busy_wall": 2.0},
    "bytes_sent": {"owner": 3},
}
FAULT = {"epoch": 0, "about": "worker-1", "error": "FrameError", "reason": "odd", "evidence": None}
CLASS = {"torch": "2.13", "device": "x86_64", "instructions": "AVX2", "threads": 1, "ranks": 1, "layout": ""}
LOG_HEAD = {
    "run": "ab" * 16,
    "last": {"number": 2, "digest": "ab" * 32},
    "forced": {"number": 1, "digest": "cd" * 32},
    "boot": "ef" * 32,
    "signature": "ab" * 64,
}
HELLO = {"epoch": 0, "address": "127.0.0.1:1", "numeric_class": CLASS, "memory": {"": 1}, "log_head": LOG_HEAD}
WORDS = {"commit": COMMIT, "applied": APPLIED, "fault": FAULT, "hello": HELLO}

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([-1e30, 1e308, -0.0, 5e-324, 2**53, -1])
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
    max_leaves=10,
)


def places(value, path=()):
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places(part, (*path, key))


def altered(body, path, value):
    if not path:
        return value
    copy = dict(body) if isinstance(body, dict) else list(body)
    copy[path[0]] = altered(body[path[0]], path[1:], value)
    return copy


PLACES = [(kind, path) for kind, body in WORDS.items() for path in places(body) if path]


@settings(max_examples=4 * settings.default.max_examples)
@example(place=("hello", ("memory",)), value={"\N{NO-BREAK SPACE}": None})
@example(place=("hello", ("memory",)), value={"\N{RIGHT-TO-LEFT OVERRIDE}\x1b[2J": None})
@given(st.sampled_from(PLACES), json_values)
def test_any_value_anywhere_in_a_word_is_refused_with_our_error_or_within_bounds(place, value):
    kind, path = place
    body = altered(WORDS[kind], path, value)
    try:
        message = parse_message(kind, body)
    except FrameError as exc:
        assert len(str(exc)) < 1000
        assert printable_text(str(exc), 1000) == str(exc)
        return

    assert len(json.dumps(message.model_dump(mode="json"))) < 100_000


@pytest.mark.parametrize("kind", sorted(WORDS))
def test_the_words_themselves_are_fine(kind):
    assert parse_message(kind, WORDS[kind]).model_dump(mode="json") == WORDS[kind]


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("commit", ("norm_squared",), -1e30),
        ("commit", ("norm_squared",), 1e308),
        ("commit", ("step",), 2**40),
        ("commit", ("stage",), 64),
        ("commit", ("sent", 0, "digest"), "AB" * 32),
        ("commit", ("received", 0, "signature"), "0" * 257),
        ("applied", ("usage", "compute"), -1.0),
        ("applied", ("usage", "compute"), 1e300),
        ("applied", ("bytes_sent", "owner"), -1),
        ("fault", ("about",), "x" * 900_000),
        ("fault", ("error",), "\x1b[2J"),
        ("hello", ("address",), "unix:///run/docker.sock"),
        ("hello", ("numeric_class", "torch"), "x" * 201),
        ("hello", ("log_head", "run"), "../" + "ab" * 14),
        ("hello", ("log_head", "run"), "ab" * 16 + "\n"),
        ("hello", ("log_head", "last", "number"), 0),
        ("hello", ("log_head", "forced", "number"), 2**53 + 1),
        ("hello", ("log_head", "last", "digest"), "AB" * 32),
        ("hello", ("log_head", "boot"), "ab" * 31),
        ("hello", ("log_head", "signature"), "ab" * 600_000),
    ],
)
def test_a_value_that_nothing_can_have_is_told_from_the_word_of_another_release(kind, path, value):
    with pytest.raises(OutOfBoundsError):
        parse_message(kind, altered(WORDS[kind], path, value))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("commit", COMMIT | {"later": 1}),
        ("commit", {key: value for key, value in COMMIT.items() if key != "gradient"}),
        ("commit", COMMIT | {"norm_squared": "much"}),
        ("commit", COMMIT | {"norm_squared": -1.0, "later": 1}),
        ("applied", APPLIED | {"usage": {"a phase of tomorrow": 1.0}}),
        ("a kind of tomorrow", {}),
    ],
)
def test_what_another_release_could_have_said_is_refused_and_is_no_evidence(kind, body):
    with pytest.raises(FrameError) as caught:
        parse_message(kind, body)

    assert not isinstance(caught.value, OutOfBoundsError)


STEERING = "\x1b]0;owned\x07\x1b[2Jtitle\u202egnp.exe\u2028next\r\nerror: all is lost" + "y" * 2000


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (Fault, FAULT, "reason"),
        (
            ScreenHit,
            {"epoch": 0, "step": 0, "microbatch": 0, "direction": "forward", "source": 1, "reason": ""},
            "reason",
        ),
    ],
)
def test_a_text_for_people_is_cut_and_cannot_steer_a_terminal(kind, body, field):
    text = getattr(parse_message(kind.kind, body | {field: STEERING}), field)

    assert text.isprintable()
    assert len(text) == 500
    assert text.startswith("?]0;owned??[2Jtitle?gnp.exe?next??error")


def test_every_phase_of_a_party_is_a_known_cost():
    source = "".join(path.read_text() for path in Path(phalanx.pipeline.__path__[0]).rglob("*.py"))

    assert set(re.findall(r'\.phase\("([a-z_]+)"\)', source)) <= COSTS
    assert isinstance(parse_message("applied", APPLIED), UpdateReport)
    assert isinstance(parse_message("hello", HELLO), Hello)
