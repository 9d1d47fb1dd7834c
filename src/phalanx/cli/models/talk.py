"""Texts on a terminal, piece by piece as a model writes them."""

import sys
from typing import TYPE_CHECKING, Any

import typer

from phalanx.cli.answers.answer import Answer, for_programs

if TYPE_CHECKING:
    from phalanx.serve import Completion, SamplingRule, TextModel


def print_completion(model: "TextModel", ids: list[int], sampling: "SamplingRule") -> "Completion":
    """Print what follows a prompt while it is written, without what steers a terminal; for programs, print nothing."""
    from phalanx.config import escape_controls

    with model.stream_text(ids, sampling) as stream:
        for piece in stream:
            if not for_programs():
                typer.echo(escape_controls(piece), nl=False)
                sys.stdout.flush()
    if not for_programs():
        typer.echo()
    return stream.completion


def chat_by_lines(model: "TextModel", sampling: "SamplingRule") -> Answer:
    """Answer each line of stdin as a turn of one chat, to the end of the input."""
    from phalanx.data.chat import ChatMessage

    messages: list[Any] = []
    while True:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False)
        text = sys.stdin.readline()
        if not text:
            return Answer({"messages": [message.model_dump(exclude_defaults=True) for message in messages]})
        if not text.strip():
            continue
        messages.append(ChatMessage(role="user", content=text.rstrip("\n")))
        completion = print_completion(model, model.chat_prompt(messages), sampling)
        messages.append(ChatMessage(role="assistant", content=completion.text))
