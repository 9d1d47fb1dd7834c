"""EPUB books: a zip file with a package that names pages in their order."""

import io
import posixpath
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal
from xml.parsers import expat

from phalanx.data.sources.extraction import PageSettings, TextExtractor
from phalanx.data.sources.files import SourceFile
from phalanx.data.sources.records import FileSettings, RawRecord, RecordClaims, RecordFiles, document_of, recorded_text
from phalanx.data.sources.source import BrokenRecord, Document
from phalanx.errors import DataError

_CONTAINER = "META-INF/container.xml"
_MOST_XML_BYTES = 4 << 20
_MOST_PAGES = 10_000
_MOST_DEPTH = 100
_TOLD_CHARACTERS = 1000
_FREE_BYTES = 16 << 20
_BLOCK_BYTES = 1 << 20
_PAGE_TYPES = ("application/xhtml+xml", "text/html")
_TOLD = ("title", "language", "creator", "rights")
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    OSError,
    EOFError,
    ValueError,
    LookupError,
    RuntimeError,  # of an encrypted file, and NotImplementedError of an unknown method
    OverflowError,
)


class EpubConfig(FileSettings, PageSettings):
    """EPUB books, a file or a directory of ``*.epub``; needs the extra `html`.

    Pages of a book are main content throughout, so the whole of each is taken.
    """

    kind: Literal["epub"] = "epub"
    main_content: bool = False


class EpubFiles(RecordFiles):
    """One record per book, which is its file; pages in the order of its spine, an empty line between two."""

    def __init__(self, config: EpubConfig) -> None:
        self._extractor = TextExtractor("epub", config)
        super().__init__(config, (".epub",))

    def _versions(self) -> list[str]:
        return self._extractor.versions()

    def _records(self, file: SourceFile, name: str) -> Iterator[RawRecord | BrokenRecord]:
        yield self._whole(file, name)

    def _document(self, record: RawRecord) -> Document:
        limits = self._limits
        most = min(limits.max_record_bytes, max(_FREE_BYTES, limits.max_ratio * len(record.content)))
        try:
            with zipfile.ZipFile(io.BytesIO(record.content)) as archive:
                book = _Book(archive, most)
                package = book.package()
                texts = [self._extractor.text_of(page, None, name) for name, page in book.pages(package)]
        except (DataError, *_ZIP_ERRORS) as exc:
            said = str(exc) if isinstance(exc, DataError) else f"is no EPUB book ({' '.join(str(exc).split())[:100]})"
            raise DataError(f"{record.name}: {said}") from exc
        told = {name: text for name, text in package.told.items() if recorded_text(text)}
        return document_of(record, "\n\n".join(text for text in texts if text), RecordClaims(fields=told))


@dataclass
class _Package:
    """What the package of a book says: files by their number, the numbers in order, and what it is called."""

    folder: str
    hrefs: dict[str, tuple[str, str]] = field(default_factory=dict)
    spine: list[str] = field(default_factory=list)
    told: dict[str, str] = field(default_factory=dict)


class _Book:
    """The files in a zip, of which no more than a bound is unpacked in all."""

    def __init__(self, archive: zipfile.ZipFile, most: int) -> None:
        self._archive, self._left = archive, most
        if "META-INF/encryption.xml" in archive.namelist() and b"EncryptedData" in self._read(
            "META-INF/encryption.xml"
        ):
            raise DataError("is encrypted, in part or as a whole")

    def package(self) -> _Package:
        """Find and read the package."""
        found: list[str] = []

        def begin(name: str, attributes: dict[str, str]) -> None:
            if name == "rootfile":
                found.append(attributes.get("full-path", ""))

        _parse_xml(self._read(_CONTAINER, _MOST_XML_BYTES), _CONTAINER, begin)
        if not found:
            raise DataError(f"{_CONTAINER} names no package")
        package = _Package(posixpath.dirname(found[0]))
        stack: list[str] = []

        def open_element(name: str, attributes: dict[str, str]) -> None:
            stack.append(name)
            if name == "item" and len(package.hrefs) < _MOST_PAGES:
                package.hrefs[attributes.get("id", "")] = (attributes.get("href", ""), attributes.get("media-type", ""))
            elif name == "itemref":
                package.spine.append(attributes.get("idref", ""))

        def text(content: str) -> None:
            if stack and stack[-1] in _TOLD and len(package.told.get(stack[-1], "")) < _TOLD_CHARACTERS:
                package.told[stack[-1]] = package.told.get(stack[-1], "") + content

        _parse_xml(self._read(found[0], _MOST_XML_BYTES), found[0], open_element, text, stack)
        if not package.spine or len(package.spine) > _MOST_PAGES:
            raise DataError(f"its spine has {len(package.spine)} pages, expected 1 to {_MOST_PAGES}")
        return package

    def pages(self, package: _Package) -> Iterator[tuple[str, bytes]]:
        """Every page of the spine, with its name."""
        for number in package.spine:
            if number not in package.hrefs:
                raise DataError(f"its spine names {number[:40]!r}, which its manifest does not")
            href, media = package.hrefs[number]
            if media in _PAGE_TYPES:
                path = urllib.parse.unquote(href.partition("#")[0])
                name = posixpath.normpath(posixpath.join(package.folder, path))
                yield name[:80], self._read(name)

    def _read(self, name: str, most: int | None = None) -> bytes:
        try:
            info = self._archive.getinfo(name)
        except KeyError as exc:
            raise DataError(f"lacks its file {name[:80]!r}") from exc
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DataError(f"{name[:80]}: is packed in a way that EPUB does not know")
        limit = self._left if most is None else min(self._left, most)
        content = bytearray()
        with self._archive.open(info) as stream:
            while block := stream.read(_BLOCK_BYTES):
                content += block
                if len(content) > limit:
                    raise DataError(f"{name[:80]}: is larger than a book may be; raise max_record_bytes or max_ratio")
        self._left -= len(content)
        return bytes(content)


def _parse_xml(
    content: bytes,
    where: str,
    begin: Callable[[str, dict[str, str]], None],
    text: Callable[[str], None] | None = None,
    stack: list[str] | None = None,
) -> None:
    """Read XML without document types: no entity is ever declared, so none can grow or reach for a file."""
    parser = expat.ParserCreate(namespace_separator=" ")
    depth = 0

    def refuse(*_: object) -> None:
        raise DataError(f"{where[:80]}: declares a document type, which a book has no need of")

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > _MOST_DEPTH:
            raise DataError(f"{where[:80]}: its elements nest deeper than {_MOST_DEPTH}")
        begin(name.rpartition(" ")[2], attributes)

    def end(_: str) -> None:
        nonlocal depth
        depth -= 1
        if stack:
            stack.pop()

    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    if text is not None:
        parser.CharacterDataHandler = text
    try:
        parser.Parse(content, True)
    except expat.ExpatError as exc:
        raise DataError(f"{where[:80]}: is not well-formed XML ({exc})") from exc
