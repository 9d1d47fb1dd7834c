"""The chat template that a run file means, at work on a tokenizer."""

from pathlib import Path

import tokenizers

from phalanx.data.chat.encoding import ChatEncoder
from phalanx.data.chat.settings import OF_MODEL
from phalanx.data.chat.template import DEFAULT_TEMPLATES, default_template, model_template, template_from_file


def open_chat(template: str, backend: tokenizers.Tokenizer, end_of_text: str, directory: Path) -> ChatEncoder:
    """Return an encoder of conversations by a chat template.

    Args:
        template: As a run file has it: of the model, one of those that come with Phalanx, or a file.
        backend: Of the tokenizers library.
        end_of_text: The special token that ends a text.
        directory: Of the tokenizer's files, where a model's template lies.

    Raises:
        DataError: The template cannot be read, or the tokenizer lacks a special token that it names.
    """
    if template in DEFAULT_TEMPLATES:
        return ChatEncoder(default_template(template, end_of_text), backend)
    if template != OF_MODEL:
        return ChatEncoder(template_from_file(Path(template), directory, end_of_text), backend)
    return ChatEncoder(model_template(directory) or default_template("chatml", end_of_text), backend)
