"""All filters of a server."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.serve.filters.characters import find_broken_character
from phalanx.serve.filters.config import FiltersConfig
from phalanx.serve.filters.note import FilterNote, TextRefused
from phalanx.serve.filters.stream import NoteCounts, StreamFilter
from phalanx.serve.filters.table import make_filters
from phalanx.serve.marks.wrapper import set_aside

_ESCAPES = re.compile(r"(?:\\u[0-9a-fA-F]{4})+|\\(.)", re.DOTALL)
_SHORT_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


@dataclass(frozen=True)
class AdmittedText:
    """A text that may go to the model.

    Attributes:
        text: The client's text, without a provenance wrapper.
    """

    text: str
    notes: tuple[FilterNote, ...]


class TextFilters:
    """The filters of both ways; one object serves all requests and keeps nothing of them.

    Args:
        config: The action of every filter, and their lists.
        special_tokens: Special tokens of the model that is served.

    Raises:
        DataError: A list or an index cannot be read.
    """

    def __init__(self, config: FiltersConfig | None = None, special_tokens: Sequence[str] = ()) -> None:
        self._config = config or FiltersConfig()
        self._inputs, self._outputs = make_filters(self._config, special_tokens)

    def describe_actions(self) -> dict[str, dict[str, str]]:
        """Return the action of every filter that is on, by its name, for ``input`` and ``output``."""
        ways = {"input": self._inputs, "output": self._outputs}
        return {
            way: {each.name: "refuse" if each.refuses else "note" for each in filters} for way, filters in ways.items()
        }

    def admit_input(self, text: str) -> AdmittedText:
        """Check a client's text; return the text that the model may read.

        A well-formed C2PA wrapper is not in the returned text, and a note reports it. Nothing else is ever taken out.
        """
        broken = find_broken_character(text)
        if broken is not None:
            raise TextRefused("utf8", f"{broken.kind} at character {broken.start}")
        if len(text) > self._config.input.max_characters:
            raise TextRefused("size", f"{len(text)} characters; at most {self._config.input.max_characters}")
        plain, wrapper = set_aside(text)
        counts = NoteCounts()
        for active in self._inputs:
            for finding in active.scan.find(plain, False):
                if active.refuses:
                    raise TextRefused(active.name, f"{finding.kind} at character {finding.start}")
                counts.add(active.name, finding.kind, finding.start)
        notes = counts.notes()
        if wrapper is not None:
            note = FilterNote(filter="provenance", kind="c2pa", action="set aside", count=1, first=wrapper.start)
            notes.append(note)
        return AdmittedText(plain, tuple(notes))

    def check_input(self, text: str) -> list[FilterNote]:
        """Check a client's text, for a caller that forwards it unchanged."""
        return list(self.admit_input(text).notes)

    def open_stream(self) -> StreamFilter:
        """Begin to filter one text of a model."""
        return StreamFilter(self._outputs)

    def check_output(self, text: str) -> list[FilterNote]:
        """Check a whole text of a model, with the same verdict as a stream of it."""
        stream = self.open_stream()
        stream.feed(text)
        stream.close()
        return stream.notes

    def open_json(self) -> "HeldJson":
        """Begin to filter JSON of a model, such as arguments of a call."""
        return HeldJson(self)

    def check_json(self, text: str) -> list[FilterNote]:
        """Check JSON that a model wrote, whole or cut off: as it stands, and as its escapes read."""
        plain = _ESCAPES.sub(_read_escapes, text)
        return [*self.check_output(text), *(self.check_output(plain) if plain != text else ())]


class HeldJson:
    """JSON that comes in pieces and is held to its end: a filter that reads pieces would not see its escapes."""

    def __init__(self, filters: TextFilters) -> None:
        self._filters, self._pieces = filters, list[str]()
        self.notes: list[FilterNote] = []

    def feed(self, text: str) -> str:
        """Take the next piece; nothing may be shown."""
        self._pieces.append(text)
        return ""

    def close(self) -> str:
        """Check all of it, and return it."""
        text = "".join(self._pieces)
        self.notes = self._filters.check_json(text)
        return text


def _read_escapes(match: re.Match[str]) -> str:
    if match[1]:
        return _SHORT_ESCAPES.get(match[1], match[1])
    return bytes.fromhex(match[0].replace("\\u", "")).decode("utf-16-be", "replace")


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return JSON with each text changed; names of keys that are more than a word are shown to `change` as well."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        for key in value:
            if not (key.isascii() and key.isidentifier()):
                change(key)
        return {key: map_texts(part, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(part, change) for part in value]
    return value
