"""Unicode form NFC in time that grows with the text, whatever the text is; and which strings are text at all."""

import re
import sys
import unicodedata
from functools import cache

from phalanx.errors import DataError

_MAX_MARKS = 30
"""Combining characters in a row that Python sorts fast enough; Unicode's stream-safe format has the same bound."""
_LAST_MARK = 0x1FFFF
"""No combining character lies behind the first two planes."""


def to_nfc(text: str) -> str:
    """Return a text in form NFC.

    Python puts combining characters in their order by insertion, in quadratic time: 100 KB of two Tibetan vowel signs
    take 14 s. Longer rows of them are sorted here first, which does not change the result.

    Source: Unicode Standard Annex 15, section 13 (stream-safe text format).
    """
    # this answers "no" at the first character out of order, and so in linear time
    if unicodedata.is_normalized("NFC", text):
        return text
    return unicodedata.normalize("NFC", _long_rows().sub(_sorted_marks, text))


def is_text(text: str) -> bool:
    """Whether a text can be written as UTF-8: it holds no lone surrogate."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_text(text: str, where: str) -> None:
    """Refuse a string that no tokenizer takes; a byte of a command line that is no UTF-8 is a surrogate too."""
    if not is_text(text):
        raise DataError(f"{where}: holds a lone surrogate, or a byte that is not UTF-8; write it in UTF-8")


def _sorted_marks(row: re.Match[str]) -> str:
    parts = "".join(unicodedata.normalize("NFD", mark) for mark in row[0])
    return "".join(sorted(parts, key=unicodedata.combining))


@cache
def _long_rows() -> re.Pattern[str]:
    marks = (chr(code) for code in range(min(_LAST_MARK, sys.maxunicode)) if not 0xD800 <= code < 0xE000)
    listed = "".join(mark for mark in marks if unicodedata.combining(unicodedata.normalize("NFD", mark)[0]))
    return re.compile(f"[{re.escape(listed)}]{{{_MAX_MARKS + 1},}}")
