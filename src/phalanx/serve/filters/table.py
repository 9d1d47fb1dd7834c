"""The filters by name and way; to add one: its scan, one line here, one key of the configuration."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx.data.rules.word_files import read_entries
from phalanx.serve.filters.addresses import ActiveMarkup, Images, Links
from phalanx.serve.filters.characters import ControlCharacters, HiddenText, NormalForm
from phalanx.serve.filters.config import FiltersConfig, OutputFilters
from phalanx.serve.filters.phrases import Orders, Phrases, SpecialTokens
from phalanx.serve.filters.scan import TextScan
from phalanx.serve.filters.topic_weights import TopicWeights
from phalanx.serve.filters.values import PersonalData, SecretValues
from phalanx.serve.filters.verbatim import VerbatimIndex, VerbatimSpans


@dataclass(frozen=True)
class FilterLine:
    """One line of a table.

    Attributes:
        make: Builds the scan, or returns None where a list that it needs is not configured.
        attack: The attack against which it stands.
    """

    make: Callable[[OutputFilters, Sequence[str]], TextScan | None]
    attack: str


INPUTS: dict[str, FilterLine] = {
    "control_characters": FilterLine(lambda _, __: ControlCharacters(), "log and terminal injection"),
    "hidden_characters": FilterLine(lambda _, __: HiddenText(lone=False, balance=True), "smuggled instructions"),
    "zero_width": FilterLine(lambda _, __: HiddenText(lone=True, balance=True), "words cut against word lists"),
    "special_tokens": FilterLine(lambda _, tokens: SpecialTokens(tokens), "a turn of another role inside a message"),
    "normal_form": FilterLine(lambda _, __: NormalForm(), "one word in several spellings"),
    "instructions": FilterLine(lambda _, __: Orders(), "prompt injection (Greshake et al. 2023)"),
    "secrets": FilterLine(lambda _, __: SecretValues(), "keys pasted into a chat"),
}
"""Of what clients send, in the order in which they are asked."""

OUTPUTS: dict[str, FilterLine] = {
    "terminal_controls": FilterLine(lambda _, __: ControlCharacters(), "escape sequences that act in a terminal"),
    "hidden_characters": FilterLine(lambda _, __: HiddenText(lone=False, balance=False), "data carried out unseen"),
    "secrets": FilterLine(lambda _, __: SecretValues(), "extraction of keys from training data"),
    "personal_data": FilterLine(lambda _, __: PersonalData(), "extraction of people's data (Carlini et al. 2021)"),
    "canaries": FilterLine(
        lambda config, _: Phrases("canary", read_entries(config.canary_files)) if config.canary_files else None,
        "a model that learned rows by heart (Carlini et al. 2019)",
    ),
    "denied_topics": FilterLine(
        lambda config, _: Phrases("denied_topic", read_entries(config.topic_files)) if config.topic_files else None,
        "text on a subject that the operator excludes",
    ),
    "topic_classifier": FilterLine(
        lambda config, _: TopicWeights(config.topic_weights) if config.topic_weights else None,
        "the same subject in words of which none is on the list",
    ),
    "verbatim": FilterLine(
        lambda config, _: VerbatimSpans(VerbatimIndex.read(config.verbatim_index)) if config.verbatim_index else None,
        "extraction of training text (Carlini et al. 2021)",
    ),
    "images": FilterLine(lambda config, _: Images(config.allowed_hosts), "a chat carried away by an image's address"),
    "links": FilterLine(lambda config, _: Links(config.allowed_hosts), "phishing; a chat carried away by a click"),
    "markup": FilterLine(lambda _, __: ActiveMarkup(), "script in the page that shows the text"),
}
"""Of what models write, in the order in which they are asked."""


@dataclass(frozen=True)
class ActiveFilter:
    """A filter that is switched on."""

    name: str
    scan: TextScan
    refuses: bool


def make_filters(config: FiltersConfig, special_tokens: Sequence[str]) -> tuple[list[ActiveFilter], list[ActiveFilter]]:
    """Build the filters of both ways.

    Raises:
        DataError: A list or an index cannot be read.
    """
    return (
        _active(INPUTS, config.input.model_dump(), config.output, special_tokens),
        _active(OUTPUTS, config.output.model_dump(), config.output, special_tokens),
    )


def _active(
    table: dict[str, FilterLine], actions: dict[str, object], config: OutputFilters, tokens: Sequence[str]
) -> list[ActiveFilter]:
    filters = []
    for name, line in table.items():
        scan = line.make(config, tokens) if actions[name] != "off" else None
        if scan is not None:
            filters.append(ActiveFilter(name, scan, actions[name] == "refuse"))
    return filters
