"""Preferences out of JSON lines, each with file and line."""

from collections.abc import Iterator
from typing import Any

from phalanx.data.chat.settings import Policy, PreferenceSource
from phalanx.data.preferences.preference import Preference, preference_of
from phalanx.data.sources.jsonl import JsonLines
from phalanx.data.sources.records import RawRecord, RecordClaims, document_of
from phalanx.data.sources.source import BrokenRecord, Document
from phalanx.errors import DataError


class PreferenceFiles(JsonLines):
    """One preference per line; what is none is an error, or is left out and counted.

    Args:
        config: Where they are.
        broken: What becomes of a line that is no preference.

    Attributes:
        num_dropped: Lines that were left out by the last reading.
    """

    def __init__(self, config: PreferenceSource, broken: Policy) -> None:
        super().__init__(config, (".jsonl",))
        self._config, self._broken = config, broken
        self.num_dropped = 0

    def preferences(self) -> Iterator[tuple[str, Preference]]:
        """Every preference with the name of its line, files by name and lines in order.

        Raises:
            DataError: A file cannot be read, or a line is broken where the run file refuses such.
        """
        self.num_dropped = 0
        for file in self.files:
            for record in self._cut(file, str(file.path)):
                found = record if isinstance(record, BrokenRecord) else self._judge(record)
                if isinstance(found, Document):
                    yield found.name, Preference.model_validate_json(found.text)
                elif found.is_unsupported:
                    continue
                elif self._broken == "refuse":
                    raise DataError(f"{found.name}: {found.reason}").about(
                        code="PHX-I014", file=found.name, found=found.reason, expected="a preference a line"
                    )
                else:
                    self.num_dropped += 1

    def _of_object(self, record: RawRecord, found: dict[str, Any]) -> Document:
        preference = preference_of(found, self._config.shape)
        return document_of(record, preference.model_dump_json(), RecordClaims())
