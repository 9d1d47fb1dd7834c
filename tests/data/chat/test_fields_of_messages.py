"""A template sees messages as they stand in the file, and a turn of which a part does not come out is refused.

The right text is what transformers renders of the same objects.
"""

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from made_chat import END
from phalanx.data.chat import parse_conversation
from phalanx.errors import DataError

CALL = {"type": "function", "function": {"name": "tide", "arguments": {"port": "Brest", "days": 2}}, "id": "c1"}
PLAIN_CALL = {"name": "tide", "arguments": {"port": "Brest", "days": 2}}
ASKED = {"role": "user", "content": "High water in Brest?"}
RESULT = {"role": "tool", "content": '{"at": "14:05"}', "tool_call_id": "c1", "name": "tide"}
SAID = {"role": "assistant", "content": "At 14:05."}
ROWS = {
    "null content": [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT, SAID],
    "no content": [ASKED, {"role": "assistant", "tool_calls": [CALL]}, RESULT, SAID],
    "empty content": [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, SAID],
    "content and a call": [ASKED, {"role": "assistant", "content": "Wait.", "tool_calls": [CALL]}, RESULT, SAID],
    "a plain call": [ASKED, {"role": "assistant", "content": None, "tool_calls": [PLAIN_CALL]}, RESULT, SAID],
    "two calls": [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}, RESULT, RESULT, SAID],
    "reasoning_content": [ASKED, {**SAID, "reasoning_content": "Look it up."}],
    "reasoning": [ASKED, {**SAID, "reasoning": "Look it up."}],
    "thinking": [ASKED, {**SAID, "thinking": "Look it up."}],
    "names": [{**ASKED, "name": "ann"}, SAID],
    "a null name": [{**ASKED, "name": None}, SAID],
    "white space": [{"role": "user", "content": "\n a\n\n"}, {"role": "assistant", "content": " b \n"}],
}
HEAD = "{% for m in messages %}<|im_start|>{{ m['role'] }}{% if m.name %}={{ m.name }}{% endif %}{{ '\n' }}"
CALLS = (
    "{% for c in m.tool_calls or [] %}<call>{% if c.function %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% else %}{{ c.name }}{{ c.arguments | tojson }}{% endif %}{% if c.id %}#{{ c.id }}{% endif %}</call>{% endfor %}"
)
THOUGHT = "{% for key in ('reasoning_content', 'reasoning', 'thinking') %}{{ m[key] or '' }}{% endfor %}"
FOOT = "<|im_end|>{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TEMPLATES = {
    "content or nothing": HEAD + THOUGHT + "{{ m['content'] or '' }}" + CALLS + FOOT,
    "content as it is": HEAD + THOUGHT + "{{ m['content'] }}" + CALLS + FOOT,
    "null told apart": HEAD + THOUGHT + "{{ 'NULL' if m.content is none else m.content }}" + CALLS + FOOT,
    "absent told apart": HEAD + THOUGHT + "{% if m.content is string %}{{ m.content }}{% endif %}" + CALLS + FOOT,
    "trimmed": HEAD + THOUGHT + "{{ (m.content or '') | trim }}" + CALLS + FOOT,
    "marked": HEAD
    + "{% if m.role == 'assistant' %}{% generation %}" + THOUGHT + "{{ m.content or '' }}" + CALLS
    + "{% endgeneration %}{% else %}{{ m.content or '' }}{% endif %}" + FOOT,
}  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_conversation_is_rendered_as_transformers_renders_the_same_objects(encoder_of, row, template):
    encoder = encoder_of(template)
    as_there = _compile_jinja_template(template).render(
        messages=row, tools=None, add_generation_prompt=False, eos_token=END
    )

    found = encoder.encode_conversation(parse_conversation({"messages": row}))

    assert encoder._backend.decode(found.ids.tolist(), skip_special_tokens=False) == as_there


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        (
            ROWS["null content"],
            HEAD + "{{ m.content or '' }}" + FOOT,
            "turn 2: its tool call .'tide'. is not written",
        ),
        (
            ROWS["null content"],
            HEAD + "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}" + FOOT,
            "turn 2: its tool call's argument .'Brest'. is not written",
        ),
        (ROWS["thinking"], HEAD + "{{ m.reasoning_content or '' }}{{ m.content }}" + FOOT, "turn 2: its thinking"),
        (ROWS["names"], HEAD + "{% if m.role != 'user' %}{{ m.content }}{% endif %}" + FOOT, "turn 1: its text"),
        (
            [{"role": "system", "content": "Be brief."}, ASKED, SAID],
            "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}",
            "turn 1: its text .'Be brief.'. is not written",
        ),
        ([ASKED, {**SAID, "reasoning": "a", "thinking": "b"}], HEAD + FOOT, "turn 2: has reasoning and thinking"),
    ],
)
def test_what_a_template_leaves_out_is_refused_and_never_learned_as_less(encoder_of, row, template, message):
    with pytest.raises(DataError, match=message):
        encoder_of(template).encode_conversation(parse_conversation({"messages": row}))


def test_a_call_is_looked_for_in_its_own_turn_and_not_among_the_tools(encoder_of):
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + HEAD + "{{ m.content or '' }}" + FOOT
    tools = [{"type": "function", "function": {"name": "tide", "parameters": {"port": "Brest", "days": "2"}}}]

    with pytest.raises(DataError, match="turn 2: its tool call"):
        encoder_of(template).encode_conversation(parse_conversation({"messages": ROWS["null content"], "tools": tools}))


def test_reasoning_that_is_not_learned_may_be_missing_and_ignored_fields_are_not_looked_for(encoder_of):
    encoder = encoder_of(HEAD + "{{ m.content }}" + FOOT)
    early = {**SAID, "reasoning": "Look it up.", "weight": 0}

    whole = encoder.encode_conversation(parse_conversation({"messages": [ASKED, early, ASKED, SAID]}))
    ignoring = encoder.encode_conversation(parse_conversation({"messages": ROWS["reasoning"]}, ignore=("reasoning",)))
    prompt = encoder.encode_prompt(parse_conversation({"messages": [ASKED, {**early, "weight": 1}, ASKED]}).messages)

    assert whole.weights.any() and ignoring.weights.any()
    assert "Look it up." not in encoder._backend.decode(list(prompt), skip_special_tokens=False)


def test_a_prompt_of_which_a_text_does_not_come_out_is_refused_too(encoder_of):
    encoder = encoder_of(HEAD + "{% if m.role != 'tool' %}{{ m.content or '' }}{% endif %}" + CALLS + FOOT)

    with pytest.raises(DataError, match="turn 3: its text"):
        encoder.encode_prompt(parse_conversation({"messages": ROWS["null content"][:3]}).messages)
