"""What a run file says of preferences; free of torch, tokenizers and templates."""

from typing import Literal, Self

from pydantic import Field, model_validator

from phalanx.config import StrictModel
from phalanx.data.chat.settings import OF_MODEL, Policy
from phalanx.data.chat.template import DEFAULT_TEMPLATES
from phalanx.data.sources.records import FileSettings

Shape = Literal["pairs", "hh", "labelled"]


class PreferenceSource(FileSettings):
    """Preferences, one JSON object a line: a file or a directory of ``*.jsonl`` (also ``.gz``, ``.zst``).

    Attributes:
        shape: ``pairs``: prompt, chosen, rejected, as texts or as messages, and a margin where there is one. ``hh``:
            chosen and rejected as transcripts that differ in the last answer, as Anthropic's. ``labelled``: prompt,
            completion, and a label that says whether it is wanted.
    """

    kind: Literal["preferences"] = "preferences"
    shape: Shape = "pairs"


class PreferencesConfig(StrictModel):
    """Answers of which it is known which is better, or whether it is wanted.

    Attributes:
        sources: Read in this order; what was seen before is dropped.
        template: How messages become text, as of conversations: ``model``, ``chatml``, ``plain`` or a ``.jinja`` file.
            Prompts that are plain texts need none: an answer follows them as it is.
        too_long: What becomes of a pair with a side that is longer than `sequence_length`.
        broken: What becomes of a line that is none: with equal sides, an empty answer, prompts that differ.
    """

    sources: tuple[PreferenceSource, ...] = Field(min_length=1)
    template: str = OF_MODEL
    too_long: Policy = "refuse"
    broken: Policy = "refuse"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.template not in (OF_MODEL, *DEFAULT_TEMPLATES) and not self.template.endswith(".jinja"):
            names = ", ".join((OF_MODEL, *DEFAULT_TEMPLATES))
            raise ValueError(f"template: {self.template!r} is none; expected {names}, or the path of a .jinja file")
        return self
