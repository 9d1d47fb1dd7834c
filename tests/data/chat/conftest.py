"""A byte-level tokenizer with the marks of a chat, and conversations of a few words."""

import pytest

from made_chat import END, TALK, byte_tokenizer
from phalanx.data.chat import ChatEncoder, ChatTemplate, parse_conversation
from phalanx.data.chat.renderer import ANY_DAY, ChatRenderer, RenderedChat, TurnSpan
from phalanx.data.chat.sandbox import SandboxedTemplate
from phalanx.data.chat.template import default_template


@pytest.fixture(scope="session")
def backend():
    """256 bytes, the end of text, and two marks."""
    return byte_tokenizer()


@pytest.fixture(scope="session")
def chatml(backend):
    """The encoder of the default template, one process for all tests."""
    with ChatEncoder(default_template("chatml", END), backend) as encoder:
        yield encoder


@pytest.fixture(scope="module")
def encoder_of(backend):
    """Make an encoder of a template's text: one process for all tests of a file, closed at the end."""
    encoders = {}

    def make(source, **tokens):
        key = (source, tuple(sorted(tokens.items())))
        if key not in encoders:
            encoders[key] = ChatEncoder(ChatTemplate("own.jinja", source, {"eos_token": END, **tokens}), backend)
        return encoders[key]

    yield make
    for encoder in encoders.values():
        encoder.close()


@pytest.fixture
def process_of():
    """Make a renderer of a template's text, with a process of its own, closed at the end."""
    made = []

    def make(source, seconds=10):
        made.append(ChatRenderer(ChatTemplate("own.jinja", source), seconds=seconds))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def rendered():
    """Render a conversation by a template's text, in this process."""

    def render(source, found=TALK):
        messages = [one.for_template() for one in parse_conversation(found).messages]
        text, spans = SandboxedTemplate(source, {}, ANY_DAY).render_turns(messages, ())
        return RenderedChat(text, tuple(TurnSpan(*span) for span in spans))

    return render
