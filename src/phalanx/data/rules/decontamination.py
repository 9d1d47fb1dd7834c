"""Documents that hold items of an evaluation set."""

import csv
import gzip
import json
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any, Literal, Self, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from phalanx.config import StrictModel
from phalanx.data.normal_form import to_nfc
from phalanx.data.rules.page import LONGEST_GRAM, Page
from phalanx.data.rules.rule import Drop, Outcome, Quarantine, RuleReason, RuleSettings, Tag
from phalanx.data.sources import Document
from phalanx.data.sources.files import note_file_read
from phalanx.errors import DataError

_MAX_ITEM_SIZE = 1 << 20
"""Characters of one line of a set's file; a longer line is no item."""


def _to_path(value: Any) -> Any:
    return Path(value) if isinstance(value, str) else value


class EvaluationSetConfig(StrictModel):
    """One evaluation set: a file of items, by its name's end JSON lines, CSV, TSV or plain lines, each also ``.gz``.

    `fields` are the columns of an item that count, each for itself; plain lines have none.
    """

    name: str = Field(min_length=1, max_length=100)
    path: Annotated[Path, BeforeValidator(_to_path)]
    fields: tuple[str, ...] = ()


class DecontaminationConfig(RuleSettings):
    """Which sets are looked for, by runs of how many words.

    An item of fewer words counts as a whole if it has `min_words`; shorter ones would be found everywhere and are
    not looked for.
    """

    kind: Literal["decontamination"] = "decontamination"
    sets: tuple[EvaluationSetConfig, ...] = Field(min_length=1)
    words: int = Field(default=13, ge=2, le=LONGEST_GRAM)
    min_words: int = Field(default=8, ge=2, le=LONGEST_GRAM, alias="least_words")
    action: Literal["drop", "quarantine", "tag"] = "drop"

    @model_validator(mode="after")
    def _check_sets(self) -> Self:
        if self.min_words > self.words:
            raise ValueError(f"min_words={self.min_words} is above words={self.words}; lower it")
        if len({evaluation_set.name for evaluation_set in self.sets}) < len(self.sets):
            raise ValueError("two evaluation sets have the same name; give each another one")
        return self


class Decontamination:
    """Finds 13 words in a row, without case and punctuation, that also stand in an item of a named evaluation set.

    The reason says which set and which item: of several the first of the first set. The sets are read once, when the
    rule is made; 12 bytes of memory an n-gram. Reworded or translated items are not found.

    Source: Brown et al. 2020, appendix C (13-grams).
    """

    def __init__(self, config: DecontaminationConfig) -> None:
        self._config = config
        hashes: dict[int, array[int]] = {}
        items: dict[int, array[int]] = {}
        self._names: list[str] = []
        self._begins: list[int] = []
        count = 0
        for evaluation_set in config.sets:
            self._begins.append(count)
            self._names.append(evaluation_set.name)
            looked_for = 0
            for item in read_items(evaluation_set):
                looked_for += any([self._add_grams(text, count, hashes, items) for text in item])
                count += 1
            if not looked_for:
                raise DataError(
                    f"evaluation set {evaluation_set.name!r}: no item of {evaluation_set.path} has "
                    f"{config.min_words} words; name the fields with its text"
                )
        self._grams = {length: _sort_grams(hashes[length], items[length]) for length in sorted(hashes)}

    def _add_grams(
        self, text: str, number: int, hashes: "dict[int, array[int]]", items: "dict[int, array[int]]"
    ) -> bool:
        """Add the runs of words of one text; tell whether it has any."""
        page = Page(Document("", to_nfc(text)), "")
        count = len(page.plain_grams(1))
        if count < self._config.min_words:
            return False
        length = min(count, self._config.words)
        grams = page.plain_grams(length)
        hashes.setdefault(length, array("Q")).frombytes(grams.tobytes())
        items.setdefault(length, array("l")).extend([number] * len(grams))
        return True

    def judge_page(self, page: Page) -> Outcome:
        """Drop, quarantine or tag a document with an item in it."""
        text = to_nfc(page.text)
        item_number = self._find_item(page if text == page.text else Page(Document("", text), ""))
        if item_number is None:
            return None
        set_index = next(index for index in reversed(range(len(self._begins))) if self._begins[index] <= item_number)
        item = f"{self._names[set_index]} item {item_number - self._begins[set_index] + 1}"
        if self._config.action == "tag":
            return Tag({"contaminated_by": item})
        reason = RuleReason("words_of", item, self._config.words)
        return Drop(reason) if self._config.action == "drop" else Quarantine(reason)

    def _find_item(self, page: Page) -> int | None:
        """The first item that a run of words of this page is of."""
        first: int | None = None
        for length, (hashes, items) in self._grams.items():
            grams = page.plain_grams(length)
            positions = np.minimum(np.searchsorted(hashes, grams), len(hashes) - 1)
            hits = positions[hashes[positions] == grams]
            if len(hits):
                lowest = int(items[hits].min())
                first = lowest if first is None else min(first, lowest)
        return first


def _sort_grams(hashes: "array[int]", items: "array[int]") -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """N-grams in order, and of each the first item that has it."""
    values, firsts = np.unique(np.frombuffer(hashes, np.uint64), return_index=True)
    return values, np.array(items, np.int32)[firsts]


def read_items(config: EvaluationSetConfig) -> Iterator[list[str]]:
    """Yield the texts of each item of a set."""
    path = config.path
    name = path.name.lower()
    kind = name.removesuffix(".gz").rpartition(".")[2]
    try:
        note_file_read(path)
        opened = gzip.open if name.endswith(".gz") else open
        with cast("IO[str]", opened(path, "rt", encoding="utf-8-sig")) as file:
            if kind in ("jsonl", "json", "csv", "tsv"):
                yield from _read_records(config, kind, file)
            elif config.fields:
                raise DataError(
                    f"evaluation set {config.name!r}: {path} is read as plain lines, which have no fields; found "
                    f"fields = {list(config.fields)}, expected none, or a file that ends in .jsonl, .json, .csv or .tsv"
                )
            else:
                yield from ([row] for row in _bounded_lines(config, file))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as exc:
        raise DataError(f"evaluation set {config.name!r}: {path} cannot be read: {exc}") from exc


def _bounded_lines(config: EvaluationSetConfig, file: IO[str]) -> Iterator[str]:
    number = 0
    while row := file.readline(_MAX_ITEM_SIZE + 1):
        number += 1
        _check_size(config, f"line {number}", row)
        yield row


def _check_size(config: EvaluationSetConfig, where: str, text: str) -> None:
    if len(text) > _MAX_ITEM_SIZE:
        raise DataError(
            f"evaluation set {config.name!r}: {where} of {config.path} has more than {_MAX_ITEM_SIZE} characters; give "
            "one item a line"
        )


def _read_records(config: EvaluationSetConfig, kind: str, file: IO[str]) -> Iterator[list[str]]:
    if not config.fields:
        raise DataError(
            f"evaluation set {config.name!r}: {config.path} has columns; list the columns with text in fields"
        )
    lines = _bounded_lines(config, file)
    # the limit is one of the process: it is never lowered, and the size of an item is looked at here
    csv.field_size_limit(max(csv.field_size_limit(), _MAX_ITEM_SIZE))
    records: Iterator[Any] = (_parse_json(line) for line in lines if line.strip())
    if kind in ("csv", "tsv"):
        records = csv.DictReader(lines, delimiter="\t" if kind == "tsv" else ",")
    for number, record in enumerate(records, start=1):
        texts = [record.get(field) for field in config.fields] if isinstance(record, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise DataError(
                f"evaluation set {config.name!r}: item {number} of {config.path} has no text in every field of "
                f"{', '.join(config.fields)}"
            )
        for text in map(str, texts):
            _check_size(config, f"item {number}", text)
        yield [str(text) for text in texts]


def _parse_json(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
