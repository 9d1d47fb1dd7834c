"""Sides that are conversations, tools and calls: every field counts as in chats, and sides share a prompt."""

import json

import pytest

from made_chat import END, byte_tokenizer
from phalanx.data.chat import ChatEncoder, parse_conversation
from phalanx.data.chat.template import ChatTemplate
from phalanx.data.preferences.encoder import AnswerEncoder
from phalanx.data.preferences.preference import parse_preference
from phalanx.data.tokenizers import open_tokenizer
from phalanx.errors import DataError

TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{{ m.reasoning_content or '' }}"
    "{{ m['content'] or '' }}"
    "{% for c in m['tool_calls'] or [] %}{{ '<call>' + (c['function'] | tojson) + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "Which planet is red?"}
MARS, VENUS = ({"role": "assistant", "content": name} for name in ("Mars.", "Venus."))
SYSTEM = {"role": "system", "content": "Be brief."}


def call(port, content=None):
    function = {"name": "tide", "arguments": {"port": port}}
    return {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": function}]}


@pytest.fixture
def rows(tmp_path):
    """The text of both rows of a pair, what is learned in brackets."""
    backend = byte_tokenizer()
    path = tmp_path / "tokenizer.json"
    backend.save(str(path))
    template = tmp_path / "own.jinja"
    template.write_text(TEMPLATE)

    def show(found, shape="pairs", ignore=()):
        one = parse_preference(found, shape, ignore)
        tokenizer = open_tokenizer(path, backend.token_to_id(END))
        with AnswerEncoder(str(template), tokenizer, path, 4096) as encoder:
            encoded = [encoder.encode_with_prompt("line 1", one, answer) for answer in one.answers]
        return [marked(backend, row) for row in encoded]

    return show


def marked(backend, row):
    learned = [False, *(label >= 0 for label in row.labels[:-1])]
    text, inside = "", False
    for token, is_learned in zip(row.ids, learned, strict=True):
        text += ("[[" if is_learned else "]]") if is_learned != inside else ""
        text, inside = text + backend.decode([token], skip_special_tokens=False), is_learned
    return text + ("]]" if inside else "")


def turn(role, text):
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


ASKED = turn("user", "Which planet is red?") + "<|im_start|>assistant\n"
BOTH = [f"{ASKED}[[{name}<|im_end|>]]" for name in ("Mars.", "Venus.")]


@pytest.mark.parametrize(
    "found",
    [
        {"prompt": "Which planet is red?", "chosen": [USER, MARS], "rejected": [USER, VENUS]},
        {"prompt": [USER], "chosen": [USER, MARS], "rejected": [USER, VENUS]},
        {"prompt": [USER], "chosen": [MARS], "rejected": [VENUS]},
        {"prompt": "Which planet is red?", "chosen": [MARS], "rejected": [VENUS]},
        {"chosen": [USER, MARS], "rejected": [USER, VENUS]},
        {"prompt": [USER], "chosen": "Mars.", "rejected": "Venus."},
        {"prompt": [USER], "chosen": [USER, MARS], "rejected": "Venus."},
        {"prompt": [USER], "chosen": [{**USER, "name": None}, MARS], "rejected": [USER, {**VENUS, "tool_calls": None}]},
    ],
)
def test_one_pair_in_every_layout_gives_the_same_rows(rows, found):
    assert rows(found) == BOTH


def test_a_system_text_of_prompt_line_or_sides_is_in_the_row(rows):
    expected = [turn("system", "Be brief.") + row for row in BOTH]

    assert rows({"prompt": [SYSTEM, USER], "chosen": [MARS], "rejected": [VENUS]}) == expected
    assert rows({"prompt": [SYSTEM, USER], "chosen": [USER, MARS], "rejected": [USER, VENUS]}) == expected
    assert rows({"system": "Be brief.", "prompt": [USER], "chosen": [MARS], "rejected": [VENUS]}) == expected
    assert rows({"chosen": [SYSTEM, USER, MARS], "rejected": [SYSTEM, USER, VENUS]}) == expected


def test_turns_between_the_prompt_and_the_answers_are_in_the_row(rows):
    more = [{"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Capital of Peru?"}]
    lima, quito = ({"role": "assistant", "content": name} for name in ("Lima.", "Quito."))
    before = turn("user", "Which planet is red?") + turn("assistant", "Hello!") + turn("user", "Capital of Peru?")

    found = rows({"prompt": [USER], "chosen": [USER, *more, lima], "rejected": [USER, *more, quito]})

    assert found == [f"{before}<|im_start|>assistant\n[[{name}<|im_end|>]]" for name in ("Lima.", "Quito.")]


def test_tools_calls_and_reasoning_are_learned_as_chats_learn_them(rows):
    good, bad = rows(
        {
            "tools": [TOOL],
            "prompt": [USER],
            "chosen": [{**call("Brest", "Wait."), "reasoning_content": "Ask."}],
            "rejected": [call("Brest, USA")],
        }
    )

    assert good.startswith('<|im_start|>system\n[{"type": "function", "function": {"name": "tide"')
    assert good.endswith('[[Ask.Wait.<call>{"name": "tide", "arguments": {"port": "Brest"}}</call><|im_end|>]]')
    assert bad.endswith('[[<call>{"name": "tide", "arguments": {"port": "Brest, USA"}}</call><|im_end|>]]')


def test_an_answer_of_a_call_its_result_and_a_text_learns_the_assistants_parts(rows):
    result = {"role": "tool", "content": "14:05"}
    sides = {name: [call(port), result, MARS] for name, port in (("chosen", "Brest"), ("rejected", "Rome"))}
    good, bad = rows({"prompt": [USER], **sides})

    assert good.count("[[") == bad.count("[[") == 2
    assert good.index("]]") < good.index("14:05") < good.rindex("[[Mars.<|im_end|>]]")


def test_the_learned_tokens_are_those_of_supervised_chats(rows):
    messages, tools = [USER, call("Brest", "Wait.")], [TOOL]
    with ChatEncoder(ChatTemplate("own", TEMPLATE, {}), byte_tokenizer()) as chats:
        as_chat = chats.encode_conversation(parse_conversation({"messages": messages, "tools": tools}))
        text = chats._backend.decode(as_chat.ids.tolist(), skip_special_tokens=False)

    good, _ = rows({"tools": tools, "prompt": [USER], "chosen": messages, "rejected": [VENUS]})

    assert good.replace("[[", "").replace("]]", "") == text.removesuffix("\n")


def test_single_answers_are_read_by_the_same_reader(rows):
    whole = rows({"prompt": [USER], "completion": [USER, MARS], "label": True}, "labelled")
    alone = rows({"completion": [USER, MARS], "label": False}, "labelled")

    assert whole == alone == BOTH[:1]
    with pytest.raises(DataError, match="begin with messages that differ from field 'prompt'"):
        rows({"prompt": [USER], "completion": [{**USER, "content": "No."}, MARS], "label": True}, "labelled")


OTHER = {"role": "user", "content": "Name a mountain."}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"prompt": [USER], "chosen": [OTHER, MARS], "rejected": [OTHER, VENUS]}, "begin with messages that differ"),
        (
            {"prompt": "Which river?", "chosen": [USER, MARS], "rejected": [USER, VENUS]},
            "begin with a question that differs",
        ),
        ({"chosen": [USER, MARS], "rejected": [OTHER, VENUS]}, "the prompt is not shared"),
        ({"prompt": [USER], "chosen": [USER, MARS], "rejected": [OTHER, VENUS]}, "begin with messages that differ"),
        (
            {"prompt": [USER, MARS], "chosen": [USER, MARS], "rejected": [USER, VENUS]},
            "begin with messages that differ",
        ),
        (
            {"chosen": [USER, MARS, OTHER, MARS], "rejected": [USER, VENUS, OTHER, MARS]},
            "after the first different answer",
        ),
        ({"prompt": [USER], "chosen": [call("Brest")], "rejected": [call("Brest")]}, "both answers are equal"),
        ({"prompt": [USER], "chosen": [{"role": "assistant", "content": None}], "rejected": [VENUS]}, "is empty"),
        ({"prompt": [USER], "chosen": [{**MARS, "weight": 0.5}], "rejected": [VENUS]}, "a weight other than 0 and 1"),
        ({"prompt": [USER], "chosen": [MARS], "rejected": [VENUS], "weight": 2}, "do not support weights"),
        ({"prompt": [USER], "chosen": [{**MARS, "score": 3}], "rejected": [VENUS]}, "turn 1.score"),
        ({"prompt": [USER, MARS], "chosen": [MARS], "rejected": [VENUS]}, "ends with the assistant's message"),
    ],
)
def test_sides_that_contradict_the_prompt_or_each_other_are_refused(found, message):
    with pytest.raises(DataError, match=message):
        parse_preference(found, "pairs")


def test_fields_that_are_named_are_not_looked_at(rows):
    found = {"prompt": [USER], "chosen": [{**MARS, "score": 3}], "rejected": [{**VENUS, "score": 1}]}

    assert rows(json.loads(json.dumps(found)), ignore=("score",)) == BOTH
