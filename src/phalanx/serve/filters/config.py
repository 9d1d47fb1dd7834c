"""The configuration of filters: their actions, and the lists that some of them need."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from phalanx.config import StrictModel

FilterAction = Literal["refuse", "note", "off"]
MAX_HOST_CHARACTERS = 253


Host = Annotated[str, Field(min_length=1, max_length=MAX_HOST_CHARACTERS)]


class InputFilters(StrictModel):
    """Filters of a client's text; text that is not UTF-8 is refused at every setting.

    Attributes:
        max_characters: Longest text, in characters (code points).
        zero_width: Lone zero-width characters, which pages have by mistake.
        hidden_characters: Tag characters, variation selectors that select nothing, overrides of direction, runs of
            zero-width characters. A well-formed C2PA wrapper is set aside and reported, not judged by this.
        special_tokens: Chat markup and the special tokens of the model.
    """

    max_characters: int = Field(default=262_144, ge=1, le=1 << 28)
    normal_form: FilterAction = "note"
    control_characters: FilterAction = "refuse"
    hidden_characters: FilterAction = "refuse"
    zero_width: FilterAction = "note"
    special_tokens: FilterAction = "refuse"
    instructions: FilterAction = "note"
    secrets: FilterAction = "note"


class OutputFilters(StrictModel):
    """Filters of a model's text.

    Attributes:
        terminal_controls: Escape sequences and other control characters.
        images: Markdown images and HTML that load an address without a click.
        allowed_hosts: Hosts that links and images may name; subdomains count as well.
        canary_files: Strings that were planted in training data, one a line; whole words, upper or lower case.
        topic_files: Words and phrases that a model may not write, one a line; the action is `denied_topics`.
        topic_weights: Words with weights, as `TopicWeights` reads them; the action is `topic_classifier`.
        verbatim_index: Index of training text, as `VerbatimIndex.write` makes it.
    """

    terminal_controls: FilterAction = "refuse"
    hidden_characters: FilterAction = "refuse"
    secrets: FilterAction = "refuse"
    personal_data: FilterAction = "note"
    links: FilterAction = "note"
    images: FilterAction = "note"
    markup: FilterAction = "note"
    canaries: FilterAction = "refuse"
    denied_topics: FilterAction = "refuse"
    topic_classifier: FilterAction = "refuse"
    verbatim: FilterAction = "refuse"
    allowed_hosts: tuple[Host, ...] = ()
    canary_files: tuple[Path, ...] = ()
    topic_files: tuple[Path, ...] = ()
    topic_weights: Path | None = None
    verbatim_index: Path | None = None


class FiltersConfig(StrictModel):
    """The section ``[filters]`` of a server's file."""

    input: InputFilters = InputFilters()
    output: OutputFilters = OutputFilters()
