"""HTML and SVG elements; plain text is always escaped, so that no name in a file becomes markup."""

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from phalanx.config import is_plain
from phalanx.errors import InputError
from phalanx.report.svg import style_sheet

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


# nothing is fetched and no script runs, whatever a file of the run holds
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def shell(title: str, sections: Sequence[Markup]) -> str:
    """Return a whole page around its sections."""
    head = element(
        "head",
        {},
        element("meta", {"charset": "utf-8"}),
        element("meta", {"http-equiv": "Content-Security-Policy", "content": _POLICY}),
        element("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        element("title", {}, title),
        style_sheet("chart.css"),
        style_sheet("page.css"),
    )
    body = element("body", {}, element("main", {}, *sections))
    return "<!doctype html>\n" + element("html", {"lang": "en"}, head, body)


def section(title: str, remark: str, *content: str) -> Markup:
    """Return one section with its heading; an empty remark is left out."""
    intro = [element("p", {"class": "remark"}, remark)] if remark else []
    return element("section", {}, element("h2", {}, title), *intro, *map(_scrolled, content))


def _scrolled(content: str) -> str:
    """A picture keeps a size at which it can be read, and is moved under a small screen."""
    return element("div", {"class": "scroll"}, content) if content.startswith("<svg") else content


def write_page(path: Path, content: str) -> Path:
    """Write a page so that a half-written one is never seen.

    Raises:
        InputError: It cannot be written there.
    """
    spare = path.with_name(f"{path.name}.tmp")
    try:
        spare.write_text(content, encoding="utf-8")
        spare.replace(path)
    except OSError as exc:
        raise InputError(f"{path}: cannot be written ({exc.strerror}); free or allow it") from exc
    return path
