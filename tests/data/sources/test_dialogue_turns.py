"""The turns of a dialogue in each shape; a shape that is none, or a turn without a text, is refused."""

import pytest

from phalanx.data.sources.turns import DialogueTurn, turns_of
from phalanx.errors import DataError

HI, YO = DialogueTurn("user", "hi"), DialogueTurn("assistant", "yo")
SHAPES = {
    "messages": {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
    "alpaca": {"instruction": "hi", "output": "yo"},
    "prompt": {"prompt": "hi", "completion": "yo"},
}


def turns(value, shape="auto"):
    return list(turns_of(value, shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_is_read_by_its_name_and_recognised(shape):
    assert turns(SHAPES[shape]) == turns(SHAPES[shape], shape) == [HI, YO]


def test_the_list_of_one_shape_may_have_the_turns_of_the_other():
    value = {"conversations": SHAPES["messages"]["messages"]}

    assert turns(value) == [HI, YO]


@pytest.mark.parametrize("name", ["GPT", "chatgpt", "bing", "bard"])
def test_names_of_programs_are_the_assistants(name):
    (turn,) = turns({"conversations": [{"from": name, "value": "yo"}]})

    assert turn.role == "assistant"


def test_a_turn_keeps_its_other_fields_and_tells_null_from_absent():
    null, absent, parts = turns(
        {
            "messages": [
                {"role": "assistant", "content": None, "tool_calls": [1]},
                {"role": " tool "},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            ]
        }
    )

    assert (null.content, null.has_content, null.others) == (None, True, {"tool_calls": [1]})
    assert (absent.role, absent.content, absent.has_content) == ("tool", None, False)
    assert parts.content == "ab"


def test_alpaca_joins_instruction_and_input_and_may_have_a_system():
    value = {"system": "be brief", "instruction": "add", "input": "1 2", "output": "3"}

    assert [(turn.role, turn.content) for turn in turns(value)] == [
        ("system", "be brief"),
        ("user", "add\n\n1 2"),
        ("assistant", "3"),
    ]
    assert turns({**SHAPES["alpaca"], "input": None, "system": ""}) == [HI, YO]


def test_an_answer_may_be_called_response_and_an_empty_completion_is_one():
    assert turns({"prompt": "hi", "response": "yo"}) == [HI, YO]
    assert turns({"prompt": "hi", "completion": "", "response": "yo"})[1].content == ""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"text": "hi"}, "no known shape; its fields are"),
        ({"messages": "hi"}, "no list of at most"),
        ({"messages": [{}] * 10_001}, "no list of at most"),
        ({"messages": ["hi"]}, "turn 1 has no text 'role'"),
        ({"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}, "turn 2 has no text 'role'"),
        ({"messages": [{"role": " ", "content": "a"}]}, "1 to 40 characters"),
        ({"messages": [{"role": "r" * 41, "content": "a"}]}, "1 to 40 characters"),
        ({"messages": [{"role": "user", "content": 1}]}, "turn 1 holds something else than text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "turn 1 holds something else than text"),
        ({"instruction": "hi"}, "'output'"),
        ({"instruction": None, "output": "yo"}, "'instruction'"),
        ({"prompt": "hi"}, "'completion'"),
    ],
)
def test_what_is_no_dialogue_is_refused_with_its_turn_or_field(value, words):
    with pytest.raises(DataError, match=words):
        turns(value)


def test_a_shape_that_is_named_is_not_looked_for():
    with pytest.raises(DataError, match="'conversations'"):
        turns(SHAPES["messages"], "sharegpt")
