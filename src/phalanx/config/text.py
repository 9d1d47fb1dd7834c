"""Make text of another party, a model or a document harmless before a terminal, a log or a page shows it."""

import unicodedata

_JOINERS = "\u200c\u200d"
"""Persian, Indic scripts and emoji are written with them; they move no cursor and turn no direction."""
MOST_CHARACTERS = 500
"""Of one text that a peer chose."""


def is_plain(character: str) -> bool:
    """Whether a character is shown as itself: no control, escape, bidirectional, invisible or line-breaking one."""
    # spaces of other widths are harmless, and a page of ours has them
    return character.isprintable() or unicodedata.category(character) == "Zs"


def printable_text(text: str, limit: int = MOST_CHARACTERS, *, keep: str = "") -> str:
    """Return at most `limit` characters of a text, with a question mark for each that is not plain.

    Args:
        limit: Characters beyond it are cut off.
        keep: Characters that may pass although they are not plain, such as line ends in a text of our own.
    """
    return "".join(character if is_plain(character) or character in keep else "?" for character in text[:limit])


def escape_controls(text: str, keep: str = "\n\t") -> str:
    """Return a whole text of a model or a document as a terminal may show it, with the code of each control character.

    Args:
        text: Any length; pieces of one text may be passed one after the other.
        keep: Characters that may pass although they are not plain.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character if is_plain(character) or character in keep or character in _JOINERS else _escape_character(character)
        for character in text
    )


def _escape_character(character: str) -> str:
    return ascii(character)[1:-1]
