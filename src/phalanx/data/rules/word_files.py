"""Lists of the user's own: one entry a line, and a search for all entries at once."""

import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from phalanx.data.sources.files import decode_text, read_lines
from phalanx.errors import DataError

MAX_ENTRIES = 5_000_000
MAX_ENTRY_CHARACTERS = 2_048

SPACELESS = "\u0e00-\u109f\u1780-\u17ff\u3040-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
"""Letters of scripts that are written without spaces, for a class of a pattern: Thai to Myanmar, Khmer, kana, CJK."""
_SPACELESS = re.compile(f"[{SPACELESS}]")

Hits = Callable[[str], Iterator[tuple[int, int, int]]]


def read_entries(files: Sequence[Path]) -> list[str]:
    """Return the entries of all files in order; blank lines and lines that begin with ``#`` are comments."""
    entries: list[str] = []
    for file in files:
        before = len(entries)
        for number, row in enumerate(read_lines(file), start=1):
            entry = decode_text(row, f"{file}, line {number}").strip()
            if len(entry) > MAX_ENTRY_CHARACTERS or len(entries) >= MAX_ENTRIES:
                raise DataError(
                    f"{file}, line {number}: an entry of {len(entry)} characters after {len(entries)} entries; at "
                    f"most {MAX_ENTRIES} of {MAX_ENTRY_CHARACTERS} characters each are allowed: shorten the list"
                )
            if entry and not entry.startswith("#"):
                entries.append(entry)
        if len(entries) == before:
            raise DataError(f"{file}: has no entry; write one on each line, or remove the file from the recipe")
    return entries


def fold_case(text: str) -> str:
    """Return the text in lower case, with each character where it was."""
    lower = text.lower()
    if len(lower) == len(text):
        return lower
    # the lower case of a few letters, such as the dotted capital I, has two characters
    return "".join(character if len(small := character.lower()) != 1 else small for character in text)


def search_all(entries: Sequence[str], rule: str) -> Hits:
    """Return a search for every entry at once (Aho-Corasick): entry, start and end of each hit, overlapping ones."""
    try:
        library = importlib.import_module("ahocorasick_rs")
    except ImportError as exc:
        raise DataError(f"{rule}: needs ahocorasick-rs; install phalanx-train[data]") from exc
    automaton = library.AhoCorasick(list(entries))
    return lambda text: iter(automaton.find_matches_as_indexes(text, overlapping=True))


def is_whole_word(text: str, start: int, end: int) -> bool:
    """Return whether a place is a word by itself; a script that is written without spaces has no such borders."""
    if _SPACELESS.match(text, start) or _SPACELESS.match(text, end - 1):
        return True
    beside = (text[start - 1 : start] if start else "", text[end : end + 1])
    return not any(character.isalnum() and not _SPACELESS.match(character) for character in beside)
