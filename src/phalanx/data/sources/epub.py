"""EPUB books: a zip file with a package that names pages in their order."""

import contextlib
import io
import posixpath
import unicodedata
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal
from xml.parsers import expat

from phalanx.data.sources.extraction import PageSettings, TextExtractor
from phalanx.data.sources.files import SourceFile
from phalanx.data.sources.listing import leftover_reason
from phalanx.data.sources.records import FileSettings, RawRecord, RecordClaims, RecordFiles, document_of, recorded_text
from phalanx.data.sources.source import BrokenRecord, Document
from phalanx.errors import DataError

_CONTAINER, _PACKAGE_TYPE = "META-INF/container.xml", "application/oebps-package+xml"
_MAX_XML_BYTES = 4 << 20
_MAX_PAGES = 10_000
_MAX_DEPTH = 100
_MAX_FALLBACKS = 10
_TOLD_CHARACTERS = 1000
_FREE_BYTES = 16 << 20
_BLOCK_BYTES = 1 << 20
_PAGE_TYPES = frozenset({"application/xhtml+xml", "text/html", "text/x-oeb1-document", "application/html+xml"})
_NO_TYPES = frozenset({"", "text/xml", "application/xml", "application/octet-stream", "text/plain"})
"""Types that writers give pages which are told by their suffix."""
_PAGE_SUFFIXES = (".xhtml", ".html", ".htm", ".xht")
_ENCRYPTION = "META-INF/encryption.xml"
_OBFUSCATIONS = frozenset({"http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC"})
"""Of fonts, so that they cannot be taken out of the book; that is no encryption of it."""
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

    def _library_versions(self) -> list[str]:
        return self._extractor.library_versions()

    def _cut_records(self, file: SourceFile, name: str) -> Iterator[RawRecord | BrokenRecord]:
        yield self._whole_record(file, name)

    def _make_document(self, record: RawRecord) -> Document:
        limits = self._limits
        max_bytes = min(limits.max_record_bytes, max(_FREE_BYTES, limits.max_ratio * len(record.content)))
        try:
            with zipfile.ZipFile(io.BytesIO(record.content)) as archive:
                book = _Book(archive, max_bytes)
                package = book.read_package()
                texts = [
                    self._extractor.extract_text(page, None, name, is_xhtml=True)
                    for name, page in book.read_pages(package)
                ]
        except (DataError, *_ZIP_ERRORS) as exc:
            reason = str(exc) if isinstance(exc, DataError) else f"is no EPUB book ({' '.join(str(exc).split())[:100]})"
            raise DataError(f"{record.name}: {reason}") from exc
        fields = {name: text for name, text in package.metadata.items() if recorded_text(text)}
        if package.unread_items:
            fields["not_read"] = ", ".join(package.unread_items)[:_TOLD_CHARACTERS]
        if not any(text.strip() for text in texts):
            raise DataError(f"{record.name}: none of its pages has a text")
        return document_of(record, "\n\n".join(text for text in texts if text), RecordClaims(fields=fields))


@dataclass
class _Package:
    """The package of a book.

    Attributes:
        items: Files of the manifest by their id.
        spine: Ids of the pages, in reading order.
        unread_items: Descriptions of spine items that are no pages.
    """

    folder: str
    items: dict[str, "_Item"] = field(default_factory=dict)
    spine: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    unread_items: list[str] = field(default_factory=list)

    def find_page(self, item_id: str) -> "_Item | None":
        """Return an item of the spine, or the first of its fallbacks that is a page; None if there is none."""
        if item_id not in self.items:
            raise DataError(f"its spine names {item_id[:40]!r}, which its manifest does not")
        for _ in range(_MAX_FALLBACKS):
            item = self.items.get(item_id)
            if item is None or item.is_page:
                return item
            item_id = item.fallback
        return None


@dataclass(frozen=True)
class _Item:
    """A file of a book.

    Attributes:
        fallback: Id of the item to use where this one is no page; empty for none.
    """

    href: str
    media: str
    fallback: str = ""

    @property
    def is_page(self) -> bool:
        """Whether it is a page, by its type, or by its suffix where the type says nothing."""
        media = self.media.partition(";")[0].strip().lower()
        path = self.href.partition("#")[0].lower()
        return media in _PAGE_TYPES or (media in _NO_TYPES and path.endswith(_PAGE_SUFFIXES))


def _path_spellings(folder: str, href: str) -> list[str]:
    """Return the possible targets of a reference: with its escapes decoded, and as they stand."""
    path = href.strip().partition("#")[0].replace("\\", "/")
    forms = (urllib.parse.unquote(path), path, urllib.parse.unquote(path.partition("?")[0]))
    paths = (posixpath.normpath(posixpath.join(folder, form)).lstrip("/") for form in forms)
    return list(dict.fromkeys(paths))


def _name_forms(name: str) -> tuple[str, ...]:
    """Return the forms of a name by which files are found, the exact one first."""
    return (name, unicodedata.normalize("NFC", name), unicodedata.normalize("NFC", name).casefold())


def _names_of(archive: zipfile.ZipFile) -> dict[str, str]:
    """Return the names of an archive by the forms that a book may name them in; the exact ones go first.

    A book that was packed together with its folder, as file managers do, is named from that folder on.
    """
    plain = {name: name.replace("\\", "/") for name in archive.namelist()}
    folders = [
        name.removesuffix(_CONTAINER)
        for name in plain.values()
        if name.endswith(f"/{_CONTAINER}") and not _is_leftover(name)
    ]
    folder = folders[0] if len(folders) == 1 and _CONTAINER not in plain.values() else ""
    name_of_form = {name: name for name in plain}
    for name, path in plain.items():
        if not path.startswith(folder) or _is_leftover(path):
            continue
        for spelling in _possible_names(path.removeprefix(folder)):
            for form in _name_forms(spelling):
                name_of_form.setdefault(form, name)
    return name_of_form


def _is_leftover(path: str) -> bool:
    return any(leftover_reason(part) for part in path.split("/"))


def _possible_names(name: str) -> Iterator[str]:
    """Return the possible names of an entry whose writer did not mark them as UTF-8; an archive is read as cp437."""
    for encoding in ("utf-8", "cp437", "cp850", "cp1252"):
        with contextlib.suppress(UnicodeError):
            yield name.encode("cp437").decode(encoding)
    yield name


class _Book:
    """The files in a zip; at most `max_bytes` of them are unpacked in all."""

    def __init__(self, archive: zipfile.ZipFile, max_bytes: int) -> None:
        self._archive, self._remaining_bytes = archive, max_bytes
        self._names = _names_of(archive)
        self._encrypted = self._encrypted_files()

    def _encrypted_files(self) -> frozenset[str]:
        """Return the files that cannot be read without a key."""
        place = self._archive_name("", _ENCRYPTION)
        if place not in self._archive.namelist():
            return frozenset()
        names: list[str] = []
        algorithm, unnamed = "", 0

        def begin(name: str, attributes: dict[str, str]) -> None:
            nonlocal algorithm, unnamed
            unnamed += (name == "EncryptedData") - (name == "CipherReference")
            if name == "EncryptedData":
                algorithm = ""
            elif name == "EncryptionMethod":
                algorithm = algorithm or attributes.get("Algorithm", "")
            elif name == "CipherReference" and algorithm not in _OBFUSCATIONS:
                names.append(self._archive_name("", attributes.get("URI", "")))

        _parse_xml(self._read_entry(place, _MAX_XML_BYTES), _ENCRYPTION, begin)
        if unnamed:
            raise DataError("is encrypted, in part or as a whole")
        return frozenset(names)

    def read_package(self) -> _Package:
        packages: list[tuple[bool, str]] = []

        def begin(name: str, attributes: dict[str, str]) -> None:
            if name == "rootfile":
                media = attributes.get("media-type", _PACKAGE_TYPE).strip().lower()
                packages.append((media != _PACKAGE_TYPE, attributes.get("full-path", "")))

        _parse_xml(self._read_entry(self._archive_name("", _CONTAINER), _MAX_XML_BYTES), _CONTAINER, begin)
        if not packages:
            raise DataError(f"{_CONTAINER} names no package")
        # a book may be there in other forms too, such as PDF
        _, path = min(packages, key=lambda entry: entry[0])
        place = posixpath.normpath(path.strip().replace("\\", "/").lstrip("/"))
        package = _Package(posixpath.dirname(place))
        stack: list[str] = []

        def open_element(name: str, attributes: dict[str, str]) -> None:
            stack.append(name)
            if name == "item" and len(package.items) < _MAX_PAGES:
                package.items[attributes.get("id", "")] = _Item(
                    attributes.get("href", ""), attributes.get("media-type", ""), attributes.get("fallback", "")
                )
            elif name == "itemref":
                package.spine.append(attributes.get("idref", ""))
            elif name in package.metadata:
                package.metadata[name] += "; "

        def text(content: str) -> None:
            if stack and stack[-1] in _TOLD and len(package.metadata.get(stack[-1], "")) < _TOLD_CHARACTERS:
                package.metadata[stack[-1]] = package.metadata.get(stack[-1], "") + content

        _parse_xml(self._read_entry(self._archive_name("", place), _MAX_XML_BYTES), place, open_element, text, stack)
        if not package.spine or len(package.spine) > _MAX_PAGES:
            raise DataError(f"its spine has {len(package.spine)} pages, expected 1 to {_MAX_PAGES}")
        return package

    def read_pages(self, package: _Package) -> Iterator[tuple[str, bytes]]:
        """Yield every page of the spine, with its name; other items are added to `package.unread_items`."""
        for item_id in package.spine:
            item = package.find_page(item_id)
            if item is None:
                other = package.items[item_id]
                package.unread_items.append(f"{other.href[:80]} ({other.media[:40] or 'of no type'})")
                continue
            name = self._archive_name(package.folder, item.href)
            if name in self._encrypted:
                raise DataError(f"is encrypted, in part or as a whole: {name[:80]!r} is a page of it")
            yield name[:80], self._read_entry(name)

    def _archive_name(self, folder: str, href: str) -> str:
        """Return the name in the archive of a file that the book names; as it is named, where there is none."""
        paths = _path_spellings(folder, href)
        forms = (form for path in paths for form in _name_forms(path))
        return next((self._names[form] for form in forms if form in self._names), paths[0])

    def _read_entry(self, name: str, max_bytes: int | None = None) -> bytes:
        try:
            info = self._archive.getinfo(name)
        except KeyError as exc:
            raise DataError(f"lacks its file {name[:80]!r}") from exc
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DataError(f"{name[:80]}: is packed in a way that EPUB does not know")
        limit = self._remaining_bytes if max_bytes is None else min(self._remaining_bytes, max_bytes)
        content = bytearray()
        with self._archive.open(info) as stream:
            while block := stream.read(_BLOCK_BYTES):
                content += block
                if len(content) > limit:
                    raise DataError(f"{name[:80]}: is larger than a book may be; raise max_record_bytes or max_ratio")
        self._remaining_bytes -= len(content)
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
        raise DataError(f"{where[:80]}: declares a document type with entities, which a book has no need of")

    def name_type(_name: str, _system: str | None, _public: str | None, has_subset: int) -> None:
        # a name alone is nothing: older writers give one, and none is ever fetched
        if has_subset:
            refuse()

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > _MAX_DEPTH:
            raise DataError(f"{where[:80]}: its elements nest deeper than {_MAX_DEPTH}")
        begin(name.rpartition(" ")[2], attributes)

    def end(_: str) -> None:
        nonlocal depth
        depth -= 1
        if stack:
            stack.pop()

    parser.StartDoctypeDeclHandler = name_type
    parser.EntityDeclHandler = refuse
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    if text is not None:
        parser.CharacterDataHandler = text
    try:
        parser.Parse(content, True)
    except expat.ExpatError as exc:
        raise DataError(f"{where[:80]}: is not well-formed XML ({exc})") from exc
