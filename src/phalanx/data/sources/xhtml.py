"""XHTML rewritten as HTML: an HTML parser reads an empty ``<title/>`` or ``<script/>`` as one that is never closed."""

import html
from xml.parsers import expat

from phalanx.errors import DataError

_NAMESPACE = "http://www.w3.org/1999/xhtml"
_VOID = frozenset(
    ["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr"]
)
_WITHOUT_TEXT = frozenset({"script", "style"})
_NEVER_CLOSED = {"plaintext": "pre", "xmp": "pre", "listing": "pre"}
"""Elements of which HTML takes the rest of the page, or tags in it, for text."""
_MAX_ENTITY_CHARACTERS = 40
_BEGIN = 1000
"""Characters at the start of a page in which its root element is looked for before the page is parsed."""


def as_html(page: str, where: str) -> str:
    """Return a page of XHTML as HTML with the same elements and text; another page as it is.

    Entities of HTML need no declaration, as in browsers; those that the page declares are taken where they are plain
    characters. No document type is fetched.

    Raises:
        DataError: The page declares an entity that stands for markup, other entities or a file.
    """
    if "<html" not in page[:_BEGIN].lower() and _NAMESPACE not in page[:_BEGIN]:
        return page
    rewriting = _XhtmlRewriter(where)
    try:
        rewriting.parser.Parse(page.encode("utf-8", "surrogatepass"), True)
    except expat.ExpatError:
        # browsers show no such page, but readers of books do, as HTML
        return page
    return "".join(rewriting.parts) if rewriting.is_xhtml else page


class _XhtmlRewriter:
    """One page on its way through the XML parser.

    Attributes:
        parser: Gets the page in UTF-8.
        is_xhtml: Its root element is of XHTML.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self.parts = ["<!DOCTYPE html>"]
        self.is_xhtml = False
        self._depth = self._silent = 0
        self.parser = expat.ParserCreate("utf-8", namespace_separator=" ")
        # undeclared entities then come to the handler below instead of ending the page
        self.parser.UseForeignDTD(True)
        self.parser.EntityDeclHandler = self._check_entity
        self.parser.SkippedEntityHandler = self._add_entity
        self.parser.StartElementHandler = self._open_element
        self.parser.EndElementHandler = self._close_element
        self.parser.CharacterDataHandler = self._add_text

    def _check_entity(
        self, name: str, is_parameter: bool, value: str | None, _base: str | None, *_more: str | None
    ) -> None:
        if is_parameter or value is None or len(value) > _MAX_ENTITY_CHARACTERS or set(value) & set("&<%"):
            raise DataError(f"{self._where}: declares the entity {name[:40]!r}, which is more than plain characters")

    def _add_entity(self, name: str, is_parameter: bool) -> None:
        if not is_parameter:
            self._add_text(html.unescape(f"&{name};"))

    def _open_element(self, name: str, attributes: dict[str, str]) -> None:
        namespace, _, tag = name.rpartition(" ")
        if not self._depth:
            self.is_xhtml = tag == "html" and namespace in ("", _NAMESPACE)
        self._depth += 1
        self._silent += tag in _WITHOUT_TEXT
        tag = _NEVER_CLOSED.get(tag, tag)
        values = "".join(f' {key}="{html.escape(value)}"' for key, value in attributes.items() if " " not in key)
        self.parts.append(f"<{tag}{values}>")

    def _close_element(self, name: str) -> None:
        tag = name.rpartition(" ")[2]
        self._depth -= 1
        self._silent -= tag in _WITHOUT_TEXT
        if tag not in _VOID:
            self.parts.append(f"</{_NEVER_CLOSED.get(tag, tag)}>")

    def _add_text(self, text: str) -> None:
        if not self._silent:
            self.parts.append(html.escape(text, quote=False))
