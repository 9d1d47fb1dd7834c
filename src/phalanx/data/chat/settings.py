"""What a run file says of conversations, and of preferences; free of torch, tokenizers and templates."""

from typing import Literal, Self

from pydantic import model_validator

from phalanx.config import StrictModel
from phalanx.data.chat.template import DEFAULT_TEMPLATES
from phalanx.data.sources.records import FileSettings
from phalanx.data.sources.turns import Shape

OF_MODEL = "model"
"""The template that a model brings; ChatML where it has none."""

Policy = Literal["refuse", "drop"]

PreferenceShape = Literal["pairs", "hh", "labelled"]


class ConversationSource(FileSettings):
    """Conversations, one JSON object a line: a file or a directory of ``*.jsonl`` (also ``.gz``, ``.zst``).

    Attributes:
        shape: Shape of the objects; "auto" looks at each.
        ignore: Fields of a message that may be there and are not read; any other unknown one is an error.
    """

    kind: Literal["conversations"] = "conversations"
    shape: Shape = "auto"
    ignore: tuple[str, ...] = ()


class ConversationsConfig(StrictModel):
    """Conversations from which a model learns the assistant's turns.

    Attributes:
        sources: Read in this order; a conversation seen before is dropped. Empty where clients of a split are remote:
            each names its own.
        template: ``model``: the chat template of the model, or ``chatml`` where it has none; ``chatml`` or ``plain`` of
            this package; or the path of a Jinja file that ends in ``.jinja``.
        too_long: Treatment of a conversation longer than `sequence_length`: an error, a counted omission, or a cut to
            its first tokens.
        broken: Treatment of a line that is no conversation, or that the template does not render.
        weighted: Whether messages and conversations have weights other than 0 and 1, for
            ``train.objective = "weighted_causal_lm"``.
    """

    sources: tuple[ConversationSource, ...] = ()
    template: str = OF_MODEL
    too_long: Literal["refuse", "drop", "cut"] = "refuse"
    broken: Policy = "refuse"
    weighted: bool = False

    @model_validator(mode="after")
    def _check_conversation_template(self) -> Self:
        _check_template(self.template)
        return self


class PreferenceSource(FileSettings):
    """Preferences, one JSON object a line: a file or a directory of ``*.jsonl`` (also ``.gz``, ``.zst``).

    Attributes:
        shape: ``pairs``: prompt, chosen, rejected, as texts or as messages, and a margin where there is one. ``hh``:
            chosen and rejected as transcripts that differ in the last answer, as Anthropic's. ``labelled``: prompt,
            completion, and a label that says whether it is wanted.
    """

    kind: Literal["preferences"] = "preferences"
    shape: PreferenceShape = "pairs"
    ignore: tuple[str, ...] = ()


class PreferencesConfig(StrictModel):
    """Answers of which it is known which is better, or whether it is wanted.

    Attributes:
        sources: Read in this order; repeated ones are dropped. Empty where clients of a split are remote: each names
            its own.
        template: How messages become text, as for conversations: ``model``, ``chatml``, ``plain`` or a ``.jinja`` file.
            Prompts that are plain texts need none: an answer follows them as it is.
        too_long: Treatment of a pair with a side that is longer than `sequence_length`: both prompts lose tokens of
            their beginning and no answer any, which is told; an error; or a counted omission.
        broken: Treatment of an invalid line: equal sides, an empty answer, prompts that differ.
    """

    sources: tuple[PreferenceSource, ...] = ()
    template: str = OF_MODEL
    too_long: Literal["refuse", "drop", "cut"] = "cut"
    broken: Policy = "refuse"

    @model_validator(mode="after")
    def _check_preference_template(self) -> Self:
        _check_template(self.template)
        return self


def _check_template(template: str) -> None:
    if template not in (OF_MODEL, *DEFAULT_TEMPLATES) and not template.endswith(".jinja"):
        names = ", ".join((OF_MODEL, *DEFAULT_TEMPLATES))
        raise ValueError(f"template: unknown template {template!r}; expected {names}, or the path of a .jinja file")
