import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import FrameError
from phalanx.pipeline.protocol.greetings import Hello
from phalanx.pipeline.protocol.messages import (
    Activation,
    Assign,
    Commit,
    Fault,
    FetchReply,
    UpdateReport,
    parse_message,
)

TENSOR = {
    "epoch": 0,
    "step": 3,
    "microbatch": 1,
    "direction": "forward",
    "source": 1,
    "target": 2,
    "dtype": "float32",
    "shape": [2, 8, 16],
}


def test_a_message_survives_the_wire():
    message = parse_message("tensor", TENSOR)

    assert isinstance(message, Activation)
    assert message.shape == (2, 8, 16)
    assert parse_message(message.kind, message.model_dump(mode="json")) == message


def test_a_nested_message_survives_the_wire():
    body = {
        "epoch": 1,
        "step": 2,
        "stage": 1,
        "received": [{"header": "{}", "signature": "00"}],
        "sent": [{"direction": "backward", "microbatch": 0, "digest": "ab" * 32}],
        "norm_squared": None,
        "gradient": "cd" * 32,
    }

    message = parse_message("commit", body)

    assert isinstance(message, Commit)
    assert message.received[0].header == "{}"
    assert message.model_dump(mode="json") == body


@pytest.mark.parametrize("kind", ["", "pickle", "Tensor", "tensor ", "x" * 10_000])
def test_an_unknown_kind_is_refused_with_the_choices(kind):
    with pytest.raises(FrameError, match=r"expected one of .*tensor") as caught:
        parse_message(kind, TENSOR)

    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", sorted(TENSOR))
def test_a_missing_field_is_refused(name):
    with pytest.raises(FrameError, match=f"'tensor'(.|\n)*{name}"):
        parse_message("tensor", {key: value for key, value in TENSOR.items() if key != name})


def test_a_field_too_many_is_refused():
    with pytest.raises(FrameError, match="extra"):
        parse_message("tensor", TENSOR | {"code": "import os"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epoch", -1),
        ("epoch", "0"),
        ("epoch", 0.5),
        ("epoch", True),
        ("epoch", None),
        ("step", -1),
        ("microbatch", [1]),
        ("direction", "sideways"),
        ("direction", None),
        ("source", -1),
        ("shape", [2, "8", 16]),
        ("shape", 16),
        ("dtype", 32),
    ],
)
def test_a_value_of_another_type_or_range_is_refused(name, value):
    with pytest.raises(FrameError, match="malformed"):
        parse_message("tensor", TENSOR | {name: value})


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 10**400])
def test_numbers_that_json_cannot_carry_are_refused(number):
    body = {
        "epoch": 0,
        "step": 0,
        "stage": 0,
        "received": [],
        "sent": [],
        "norm_squared": number,
        "gradient": "cd" * 32,
    }

    with pytest.raises(FrameError):
        parse_message("commit", body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KINDS = ["hello", "setup", "assign", "ready", "tensor", "bulk", "commit", "audit", "applied", "fault", "fetched"]


@given(st.sampled_from(KINDS), st.dictionaries(st.text(max_size=12), json_values, max_size=6))
def test_any_body_is_parsed_or_refused_and_nothing_else(kind, body):
    try:
        message = parse_message(kind, body)
    except FrameError:
        return

    assert json.loads(json.dumps(message.model_dump(mode="json"))) == body


@given(st.sampled_from(sorted(TENSOR)), json_values)
def test_any_value_of_one_field_is_parsed_or_refused_and_nothing_else(name, value):
    try:
        message = parse_message("tensor", TENSOR | {name: value})
    except FrameError:
        return

    assert message.model_dump(mode="json") == TENSOR | {name: value}


def test_messages_cannot_be_changed_after_they_were_parsed():
    message = parse_message("tensor", TENSOR)

    with pytest.raises(ValueError, match="frozen"):
        message.step = 4


def test_each_class_has_a_kind_of_its_own():
    kinds = [cls.kind for cls in (Activation, UpdateReport, Assign, Commit, Fault, FetchReply, Hello)]

    assert len(set(kinds)) == len(kinds)
