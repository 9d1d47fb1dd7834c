"""Make text of another party harmless before a terminal, a log or a page shows it."""

import unicodedata

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
