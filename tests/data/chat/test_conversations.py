"""Conversations of every shape come to one strict form; what is none is told by turn."""

import pytest

from phalanx.data.chat import parse_conversation
from phalanx.errors import DataError


def said(found):
    """Roles and texts."""
    return [(one.role, one.content) for one in parse_conversation(found).messages]


PAIR = [("user", "why?"), ("assistant", "so")]


@pytest.mark.parametrize(
    "found",
    [
        {"messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so", "name": None}]},
        {"conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "so"}], "id": 7},
        {"instruction": "why?", "input": "", "output": "so"},
        {"prompt": "why?", "completion": "so"},
    ],
    ids=["messages", "sharegpt", "alpaca", "prompt"],
)
def test_one_conversation_in_every_shape_is_the_same(found):
    assert said(found) == PAIR


def test_the_system_text_of_an_object_comes_first():
    found = {"system": "Be kind.", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}

    assert said(found)[0] == ("system", "Be kind.")


def test_tool_calls_and_results_are_kept_as_templates_expect_them():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    found = parse_conversation(
        {
            "messages": [
                {"role": "user", "content": "1?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "2", "tool_call_id": "c1"},
                {"role": "assistant", "content": "2", "weight": 0.5},
            ],
            "tools": [{"type": "function", "function": {"name": "add"}}],
            "weight": 2.0,
        }
    )

    plain = [one.for_template() for one in found.messages]
    assert plain[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert plain[2] == {"role": "tool", "content": "2", "tool_call_id": "c1"}
    assert (found.weight, found.messages[3].weight, len(found.tools)) == (2.0, 0.5, 1)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"messages": []}, "empty conversation"),
        ({"messages": [{"content": "a"}]}, "turn 1 has no text 'role'"),
        (
            {"messages": [{"role": "narrator", "content": "a"}]},
            "turn 1: has the role 'narrator'; expected system, user",
        ),
        ({"messages": [{"role": "user", "content": "  "}]}, "turn 1: of role 'user', is empty"),
        ({"messages": [{"role": "user", "content": 7}]}, "turn 1 holds something else than text"),
        ({"messages": [{"role": "user", "content": "a", "wieght": 1}]}, "turn 1.wieght: Extra inputs"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": -1}]}, "turn 1.weight: Input should be greater"),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": float("nan")}]},
            "turn 1.weight",
        ),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{"name": "f"}]}]}, "turn 1: .*calls tools"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "arguments of a tool call are not JSON",
        ),
        ({"messages": [{"role": "user", "content": "a"}] * 10_001}, "at most 10000 turns"),
        ({"text": "a"}, "no known shape"),
    ],
)
def test_what_is_no_conversation_is_told_by_turn(found, message):
    with pytest.raises(DataError, match=message):
        parse_conversation(found)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "a"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}],
    ],
    ids=["nobody answers", "the answer is left out"],
)
def test_a_conversation_without_a_learned_turn_is_told(messages):
    with pytest.raises(DataError, match="no message of the assistant to learn"):
        parse_conversation({"messages": messages}).check_learnable()
