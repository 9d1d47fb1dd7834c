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


def printable(text: str, limit: int = MOST_CHARACTERS, *, keep: str = "") -> str:
    """Return at most `limit` characters of a text, with a question mark for each that is not plain.

    Args:
        text: Text of another party.
        limit: Characters beyond it are cut off.
        keep: Characters that may pass although they are not plain, such as line ends in a text of our own.
    """
    return "".join(one if is_plain(one) or one in keep else "?" for one in text[:limit])


def escape_controls(text: str, keep: str = "\n\t") -> str:
    """Return a whole text of a model or a document as a terminal may show it, with the code of each control character.

    Args:
        text: Of any length; pieces of one text may be given one after the other.
        keep: Characters that may pass although they are not plain.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(one if is_plain(one) or one in keep or one in _JOINERS else _escaped(one) for one in text)


def _escaped(character: str) -> str:
    return ascii(character)[1:-1]
