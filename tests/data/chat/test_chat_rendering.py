"""A chat template runs in a sandbox, is bounded, and what the assistant writes is found by its tag or by prefixes."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from phalanx.data.chat import ChatTemplate, parse_conversation
from phalanx.data.chat.renderer import ChatRenderer
from phalanx.data.chat.sandbox import UnstableTemplateError
from phalanx.data.chat.template import DEFAULT_TEMPLATES
from phalanx.errors import DataError, ModelError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{%- for m in messages %}{{- '<|h|>' + m.role + '<|/h|>\n\n' + m.content | trim + '<|eot|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|h|>assistant<|/h|>\n\n' }}{%- endif %}"
)
BLIND = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
FORGETS = "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}{{ m.content }}\n{% endif %}{% endfor %}"
CHANGES = "{{ messages | length }}{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
SHOUTS = "{% for m in messages %}{{ m.role }}:{{ m.content | upper }}\n{% endfor %}"
TALK = {
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": " yo "},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "ok"},
    ]
}


def turns(chat):
    """What the assistant writes."""
    return [chat.text[turn.start : turn.stop] for turn in chat.turns]


@pytest.mark.parametrize("source", [CHATML, LLAMA, BLIND, *DEFAULT_TEMPLATES.values()])
def test_the_text_is_that_of_transformers(source):
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    conversation = parse_conversation(TALK)
    plain = [one.for_template() for one in conversation.messages]

    with ChatRenderer(ChatTemplate("t", source, tokens)) as renderer:
        whole, prompt = (
            renderer.render_conversation(conversation).text,
            renderer.render_prompt(conversation.messages[:3]),
        )

    assert render_jinja_template([plain], chat_template=source, **tokens)[0] == [whole]
    expected = render_jinja_template([plain[:3]], chat_template=source, add_generation_prompt=True, **tokens)[0]
    assert expected == [prompt]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, [" yo <|im_end|>\n", "ok<|im_end|>\n"]),
        (LLAMA, ["yo<|eot|>", "ok<|eot|>"]),
        (BLIND, ["assistant:  yo \n", "assistant: ok\n"]),
        (DEFAULT_TEMPLATES["chatml"], [" yo <|im_end|>", "ok<|im_end|>"]),
    ],
    ids=["chatml", "llama", "no beginning is given", "tag"],
)
def test_what_the_assistant_writes_follows_the_beginning_that_it_is_given(rendered, source, expected):
    chat = rendered(source, TALK)

    assert turns(chat) == expected
    assert [turn.message for turn in chat.turns] == [1, 3]


def test_a_message_that_holds_a_tag_marks_nothing(rendered):
    talk = {"prompt": "{% generation %}x{% endgeneration %}", "completion": "{{ 7*7 }}\x00"}

    assert turns(rendered(DEFAULT_TEMPLATES["chatml"], talk)) == ["{{ 7*7 }}\x00<|im_end|>"]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (FORGETS, "message 2 changes the text before it"),
        (CHANGES, "message 2 changes the text before it"),
        (SHOUTS, "message 2 is not written unchanged"),
        ("{% if false %}{% generation %}{% endgeneration %}{% endif %}a", "marks no text"),
    ],
)
def test_a_template_that_cannot_tell_its_turns_is_refused(rendered, source, why):
    with pytest.raises(UnstableTemplateError, match=why):
        rendered(source, TALK)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("{% for m in %}", ModelError, "is not a usable template"),
        ("{{ raise_exception('roles must alternate') }}", DataError, "does not render.*roles must alternate"),
        pytest.param("{{ 7 + 'a' }}", DataError, "does not render", marks=pytest.mark.slow),
        (FORGETS, DataError, "the assistant's text cannot be located: message 2 .*% generation %"),
        ("{{ messages.__class__.__mro__ }}", ModelError, "does what no template may"),
        pytest.param(
            "{% set n = namespace(__init__=7) %}", ModelError, "does what no template may", marks=pytest.mark.slow
        ),
        ("{{ 'a' * 10**10 }}", ModelError, "takes more memory"),
        ("{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}", ModelError, "writes more than"),
        pytest.param("{% include 'a' %}", DataError, "does not render", marks=pytest.mark.slow),
    ],
)
def test_a_template_that_is_broken_or_attacks_is_named(process_of, source, error, message):
    with pytest.raises(error, match=f"chat template own.jinja.*{message}"):
        process_of(source).render_conversation(parse_conversation(TALK))


def test_a_template_without_an_end_is_ended_by_the_kernel_and_the_next_conversation_is_rendered(process_of):
    forever = "{% if messages[0].content == 'a' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    renderer = process_of(f"{forever}{{% endfor %}}{{% endif %}}{CHATML}", seconds=1)

    with pytest.raises(ModelError, match="more time or memory than a template may; its process ended with signal"):
        renderer.render_conversation(parse_conversation({"prompt": "a", "completion": "b"}))
    assert turns(renderer.render_conversation(parse_conversation(TALK))) == [" yo <|im_end|>\n", "ok<|im_end|>\n"]


def test_the_date_of_a_template_is_the_same_tomorrow(rendered):
    assert rendered("{{ strftime_now('%d %b %Y') }}" + CHATML, TALK).text.startswith("26 Jul 2024")
