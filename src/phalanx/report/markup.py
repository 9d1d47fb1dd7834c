"""HTML and SVG elements; plain text is always escaped, so that no name in a file becomes markup."""

import html
from collections.abc import Iterable, Mapping

from phalanx.config import is_plain

Attributes = Mapping[str, str | int | float]
_EMPTY_ELEMENTS = frozenset({"meta", "br", "circle", "line", "path", "rect"})


class Markup(str):
    """Text that is markup already, made by `element`; every other string is escaped."""

    __slots__ = ()


def element(tag: str, attributes: Attributes, *children: str) -> Markup:
    """Return one element.

    Args:
        tag: Its name.
        attributes: Values are escaped; a float is written with two decimals at most.
        children: `Markup` as it is, any other text escaped.
    """
    shown = "".join(f' {name}="{_attribute(value)}"' for name, value in attributes.items())
    if tag in _EMPTY_ELEMENTS and not children:
        return Markup(f"<{tag}{shown}/>")
    return Markup(f"<{tag}{shown}>{join(children)}</{tag}>")


def join(parts: Iterable[str]) -> Markup:
    """Put parts one after the other; plain text among them is escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def escape(text: str) -> Markup:
    """Escape text for element content and for quoted attributes.

    Control, formatting and surrogate characters become U+FFFD: they could reverse or hide what is read.
    """
    visible = "".join(char if is_plain(char) or char in "\n\t" else "\ufffd" for char in text)
    return Markup(html.escape(visible, quote=True))


def _attribute(value: str | int | float) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return escape(str(value))
