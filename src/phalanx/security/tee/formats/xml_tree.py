"""The part of XML that signed manifests use, and its canonical form.

No document type, entities, comments or processing instructions, and no attributes of the `xml` namespace: without
them Canonical XML 1.0 and 1.1 are the same, and no two readers see another document.

Source: W3C, Canonical XML 1.1; Namespaces in XML 1.0.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from xml.parsers import expat

from phalanx.security.tee.formats.reader import malformed_error

MAX_BYTES = 1024 * 1024
_MAX_DEPTH, _MAX_ELEMENTS = 16, 4096
_IN_TEXT = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "\r": "&#xD;"}
_IN_ATTRIBUTES = {"&": "&amp;", "<": "&lt;", '"': "&quot;", "\t": "&#x9;", "\n": "&#xA;", "\r": "&#xD;"}


@dataclass
class XmlElement:
    """One element.

    Attributes:
        attributes: Likewise, namespace declarations left out.
        scope: Namespace by prefix, with the prefixes of all ancestors; ``""`` is the default one.
    """

    tag: str
    attributes: Mapping[str, str]
    scope: Mapping[str, str]
    children: "list[XmlElement | str]" = field(default_factory=list)

    @property
    def expanded_name(self) -> tuple[str, str]:
        """Namespace and local name."""
        prefix, _, local = self.tag.rpartition(":")
        return self.scope.get(prefix, ""), local

    @property
    def child_elements(self) -> "list[XmlElement]":
        """Children that are elements."""
        return [child for child in self.children if isinstance(child, XmlElement)]

    @property
    def text_content(self) -> str:
        """Its text; only of an element without child elements."""
        return "".join(child for child in self.children if isinstance(child, str))

    def find_attribute(self, name: tuple[str, str]) -> str | None:
        """Return an attribute by namespace and local name; one without a prefix has no namespace."""
        return next((value for key, value in self.attributes.items() if _expand_name(key, self.scope) == name), None)


def parse_xml(data: bytes, where: str) -> XmlElement:
    """Read one document in UTF-8 and return its root."""
    if len(data) > MAX_BYTES:
        raise malformed_error(where, f"{len(data)} bytes, allowed {MAX_BYTES}")
    builder = _TreeBuilder(where)
    parser = expat.ParserCreate("UTF-8")
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = builder.start_element, builder.end_element
    parser.CharacterDataHandler = builder.add_characters
    for name in ("StartDoctypeDecl", "EntityDecl", "Comment", "ProcessingInstruction", "StartCdataSection"):
        setattr(parser, f"{name}Handler", builder.refuse_construct)
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, UnicodeError, ValueError) as exc:
        raise malformed_error(where, f"is no XML document ({exc})") from exc
    if builder.root is None:
        raise malformed_error(where, "has no element")
    return builder.root


class _TreeBuilder:
    def __init__(self, where: str) -> None:
        self._where, self._open, self._count = where, list[XmlElement](), 0
        self.root: XmlElement | None = None

    def start_element(self, tag: str, raw_attributes: dict[str, str]) -> None:
        self._count += 1
        if self._count > _MAX_ELEMENTS or len(self._open) >= _MAX_DEPTH:
            raise malformed_error(self._where, "too many elements, or nested too deep")
        declared = {_declared_prefix(key): value for key, value in raw_attributes.items() if _is_declaration(key)}
        scope = {**(self._open[-1].scope if self._open else {}), **declared}
        attributes = {key: value for key, value in raw_attributes.items() if not _is_declaration(key)}
        element = XmlElement(tag, attributes, scope)
        self._check_element(element, declared)
        if self._open:
            self._open[-1].children.append(element)
        else:
            self.root = element
        self._open.append(element)

    def end_element(self, tag: str) -> None:
        del tag
        self._open.pop()

    def add_characters(self, text: str) -> None:
        self._open[-1].children.append(text)

    def refuse_construct(self, *_: object) -> None:
        raise malformed_error(self._where, "holds a document type, entity, comment, CDATA or processing instruction")

    def _check_element(self, element: XmlElement, declared: Mapping[str, str]) -> None:
        names = [element.tag, *element.attributes]
        prefixes = {name.rpartition(":")[0] for name in names if ":" in name}
        if any(name.count(":") > 1 for name in names) or not prefixes <= set(element.scope):
            raise malformed_error(self._where, f"element {element.tag[:40]!r} uses a prefix that is not declared")
        if {"xml", "xmlns"} & set(declared) or any(prefix and not uri for prefix, uri in declared.items()):
            raise malformed_error(self._where, f"element {element.tag[:40]!r} declares a prefix that it may not")
        if len({_expand_name(key, element.scope) for key in element.attributes}) != len(element.attributes):
            raise malformed_error(self._where, f"element {element.tag[:40]!r} has an attribute twice")


def canonical_xml(element: XmlElement, without: XmlElement | None = None) -> bytes:
    """Write an element in the canonical form; as part of its document, with the namespaces that are in scope there."""
    return "".join(_write_element(element, without, {})).encode("utf-8")


def _write_element(element: XmlElement, without: XmlElement | None, above: Mapping[str, str]) -> Iterator[str]:
    yield f"<{element.tag}"
    # sorted by prefix, the default one first; what an ancestor has said is not said again
    for prefix, uri in sorted(element.scope.items()):
        if above.get(prefix, "") != uri:
            yield f' xmlns{":" if prefix else ""}{prefix}="{_escape_text(uri, _IN_ATTRIBUTES)}"'
    for key, value in sorted(element.attributes.items(), key=lambda pair: _expand_name(pair[0], element.scope)):
        yield f' {key}="{_escape_text(value, _IN_ATTRIBUTES)}"'
    yield ">"
    for child in element.children:
        if isinstance(child, str):
            yield _escape_text(child, _IN_TEXT)
        elif child is not without:
            yield from _write_element(child, without, element.scope)
    yield f"</{element.tag}>"


def _expand_name(key: str, scope: Mapping[str, str]) -> tuple[str, str]:
    prefix, _, local = key.rpartition(":")
    return (scope.get(prefix, "") if prefix else ""), local


def _is_declaration(key: str) -> bool:
    return key == "xmlns" or key.startswith("xmlns:")


def _declared_prefix(key: str) -> str:
    return key.removeprefix("xmlns").removeprefix(":")


def _escape_text(text: str, table: Mapping[str, str]) -> str:
    return "".join(table.get(character, character) for character in text)
