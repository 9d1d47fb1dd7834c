"""What a run file says of conversations; free of torch, tokenizers and templates."""

from typing import Literal, Self

from pydantic import Field, model_validator

from phalanx.config import StrictModel
from phalanx.data.chat.template import DEFAULT_TEMPLATES
from phalanx.data.sources.records import FileSettings
from phalanx.data.sources.turns import Shape

OF_MODEL = "model"
"""The template that a model brings; ChatML where it has none."""

Policy = Literal["refuse", "drop"]


class ConversationSource(FileSettings):
    """Conversations, one JSON object a line: a file or a directory of ``*.jsonl`` (also ``.gz``, ``.zst``).

    Attributes:
        shape: Of the objects; "auto" looks at each.
        ignore: Fields of a message that may be there and are not read; any other unknown one is an error.
    """

    kind: Literal["conversations"] = "conversations"
    shape: Shape = "auto"
    ignore: tuple[str, ...] = ()


class ConversationsConfig(StrictModel):
    """Conversations of which a model learns what the assistant says.

    Attributes:
        sources: Read in this order; a conversation seen before is dropped.
        template: ``model``: the chat template of the model, or ``chatml`` where it has none; ``chatml`` or ``plain`` of
            this package; or the path of a Jinja file that ends in ``.jinja``.
        too_long: What becomes of a conversation that is longer than `sequence_length`: an error; left out and counted;
            or its first tokens are kept.
        broken: What becomes of a line that is no conversation, or that the template does not render.
        weighted: Whether messages and conversations have weights other than 0 and 1, for
            ``train.objective = "weighted_causal_lm"``.
    """

    sources: tuple[ConversationSource, ...] = Field(min_length=1)
    template: str = OF_MODEL
    too_long: Literal["refuse", "drop", "cut"] = "refuse"
    broken: Policy = "refuse"
    weighted: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.template not in (OF_MODEL, *DEFAULT_TEMPLATES) and not self.template.endswith(".jinja"):
            names = ", ".join((OF_MODEL, *DEFAULT_TEMPLATES))
            raise ValueError(f"template: {self.template!r} is none; expected {names}, or the path of a .jinja file")
        return self
