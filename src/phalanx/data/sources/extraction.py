"""Text out of web pages: their charset found and kept to, their nesting bounded, one switch between two extractors."""

import codecs
import importlib
import importlib.metadata
import re
import signal
from collections.abc import Callable
from typing import Literal

from pydantic import Field

from phalanx.config import StrictModel
from phalanx.config.strict import later_key
from phalanx.data.sources.charsets import (
    MARKS,
    UNREADABLE,
    codec_of,
    declared_codec,
    decode_as,
    is_single_byte,
    is_utf8,
)
from phalanx.data.sources.extractors import CPU_SECONDS, EXTRACTORS, extract_with
from phalanx.data.sources.reader_process import ReaderProcess
from phalanx.data.sources.xhtml import as_html
from phalanx.errors import DataError

_READING = "charsets and XHTML 1"
"""Changes where the same bytes come to another text, so that no cache gives the older one."""
Extractor = Literal["resiliparse", "trafilatura"]


class PageSettings(StrictModel):
    """The keys of sources that hold web pages.

    Attributes:
        extractor: `resiliparse` is fast; `trafilatura` keeps more of the text and less of its surroundings.
        main_content: Navigation, headers and footers are left out; `trafilatura` knows no other way.
        encoding: Encoding of pages; "detect" takes their mark, their header, their declaration, UTF-8, or a detected
            one, in this order.
    """

    extractor: Extractor = later_key("resiliparse")
    main_content: bool = True
    encoding: str = Field(default="detect", min_length=1)


DETECT = "detect"
_NEVER = frozenset({"punycode", "idna", "unicode-escape", "raw-unicode-escape", "undefined", "utf-7"})
"""Codecs of Python that are no charset of a page, some of them slow on purpose-made input."""
_NESTING = re.compile(r"<(/?)(div|a|b|big|code|em|font|i|nobr|s|small|strike|strong|tt|u)(?=[\s/>])", re.IGNORECASE)
_FEW_TAGS = 1000
_MODULE = "phalanx.data.sources.page_process"
_FREE_CHARACTERS = 16 << 10
"""Of a page that is read in this process: whatever it is made of, it takes less than a fifth of a second."""
_FREE_TEXT, _MAX_TEXT_RATIO = 1 << 20, 8
"""Lists within lists are indented, so that a page of 40 KB can have a text of 64 MB."""
# measured: a second for five million levels gone up through; 400 bytes for each formatting element opened again
_DIV_WORK, _DIV_DEPTH = 5_000_000, 50
_FORMAT_WORK, _FORMAT_DEPTH = 1_000_000, 4


class TextExtractor:
    """Makes text of pages by the library that the config names."""

    def __init__(self, kind: str, config: PageSettings) -> None:
        self._config = config
        extra = "html" if config.extractor == "resiliparse" else "data"
        try:
            self._extract = EXTRACTORS[config.extractor](main_content=config.main_content)
            self._detect: Callable[[bytes], str] = importlib.import_module("resiliparse.parse.encoding").detect_encoding
        except ImportError as exc:
            raise DataError(f"source kind {kind!r} needs {config.extractor}; install phalanx-train[{extra}]") from exc

    def library_versions(self) -> list[str]:
        """Names and versions of what decides on the text."""
        libraries = sorted({"resiliparse", self._config.extractor})
        return [_READING, *(f"{name} {importlib.metadata.version(name)}" for name in libraries)]

    def extract_text(self, page: bytes, declared: str | None, where: str, *, is_xhtml: bool = False) -> str:
        """Return the text of a page.

        Args:
            declared: The charset that came with it, in a header.
            is_xhtml: It is said to be XHTML, by its type or the suffix of its file.

        Raises:
            DataError: It is not in the charset that it is said to be in, nests too deep, costs more than a page may, or
                the extractor fails.
        """
        content = self.decode_page(page, declared, where)
        if is_xhtml:
            content = as_html(content, where)
        _check_nesting(content, where)
        try:
            text = (
                extract_with(self._extract, content)
                if len(content) <= _FREE_CHARACTERS
                else self._extract_apart(content)
            )
        except DataError as exc:
            raise DataError(f"{where}: {self._config.extractor} {exc}") from exc
        if len(text) > max(_FREE_TEXT, _MAX_TEXT_RATIO * len(content)):
            raise DataError(f"{where}: its text is more than {_MAX_TEXT_RATIO} times the page, by indentation")
        return text

    def _extract_apart(self, page: str) -> str:
        """Extract in a process that ends where the page costs too much."""
        config, content = self._config, page.encode("utf-8", "surrogatepass")
        base_s, per_mib_s = CPU_SECONDS[config.extractor]
        order = {
            "extractor": config.extractor,
            "main_content": config.main_content,
            "seconds": base_s + per_mib_s * len(content) / 2**20,
        }
        reader = ReaderProcess.take_idle(_MODULE, f"{config.extractor} {config.main_content}")
        try:
            ((_, text),) = reader.read(order, content)
        except DataError as exc:
            if reader.exit_code is None:
                reader.give_back()
                raise
            if reader.exit_code == -signal.SIGPROF:
                what = f"more than {base_s} s of a processor and {per_mib_s} s a MiB"
            else:
                what = "too much memory, or its process crashed"
            raise DataError(f"takes {what}") from exc
        reader.give_back()
        return text.decode("utf-8", "surrogatepass")

    def decode_page(self, content: bytes, declared: str | None, where: str, *, is_page: bool = True) -> str:
        """Decode strictly, as browsers choose the charset; a text that is no page declares nothing.

        A mark goes before a header, that before a declaration, and this before UTF-8. Names that no browser knows count
        for nothing; UTF-8 with characters of several bytes goes before a charset of one byte a character.
        """
        if self._config.encoding != DETECT:
            return _decode_strictly(content, self._config.encoding, where)
        for mark, marked in MARKS:
            if content.startswith(mark):
                return _decode_as(content[len(mark) :], marked, where)
        codec = None if declared is None else codec_of(declared)
        if codec is None and is_page:
            codec = declared_codec(content)
        if codec is None and declared is not None and not is_page and not (content.isascii() or is_utf8(content)):
            raise DataError(f"{where}: unknown encoding {declared[:40]!r}; use a name that browsers know")
        if codec is None or (is_single_byte(codec) and is_utf8(content)):
            codec = "utf-8" if content.isascii() or is_utf8(content) else codec_of(self._detect(content)) or "utf-8"
        return _decode_as(content, codec, where)


def _decode_as(content: bytes, codec: str, where: str) -> str:
    try:
        return decode_as(content, codec).removeprefix("\ufeff")
    except UnicodeDecodeError as exc:
        raise _decoding_error(exc, content, codec, where) from exc


def _decoding_error(exc: UnicodeError, content: bytes, encoding: str, where: str) -> DataError:
    if encoding == UNREADABLE:
        return DataError(f"{where}: is in {encoding}, which no browser reads; convert it to UTF-8").with_facts(
            code="PHX-I015", file=where, found=encoding, do="convert it to UTF-8"
        )
    place = f"byte {exc.start} (0x{content[exc.start]:02x})" if isinstance(exc, UnicodeDecodeError) else "it"
    return DataError(f"{where}: {place} is not {encoding[:40]}").with_facts(
        code="PHX-I015", file=where, expected=encoding[:40]
    )


def _decode_strictly(content: bytes, encoding: str, where: str) -> str:
    try:
        codec = codecs.lookup(encoding).name
        return content.decode("" if codec in _NEVER else codec).removeprefix("\ufeff")
    except UnicodeError as exc:
        raise _decoding_error(exc, content, encoding, where) from exc
    except (LookupError, ValueError) as exc:
        # ValueError: a name with a null character
        raise DataError(f"{where}: unknown encoding {encoding[:40]!r}; use a name that Python knows") from exc


def _check_nesting(page: str, where: str) -> None:
    """Refuse a page of some kilobytes that costs an extractor seconds, or gigabytes.

    Extractors go up through all open `div` elements from each inner tag. Formatting elements that are left open are
    opened again in each paragraph, as browsers do.
    """
    tags = page.count("<")
    if tags <= _FEW_TAGS:
        return
    depths: dict[str, int] = {}
    open_divs = open_formats = div_work = format_work = last = 0
    for tag in _NESTING.finditer(page):
        between = page.count("<", last, tag.end())
        last = tag.end()
        div_work += between * open_divs
        format_work += between * open_formats
        name = tag[2].lower()
        change = 1 if not tag[1] else -1 if depths.get(name) else 0
        depths[name] = depths.get(name, 0) + change
        if name == "div":
            open_divs += change
        else:
            open_formats += change
    rest = page.count("<", last)
    if div_work + rest * open_divs > max(_DIV_WORK, _DIV_DEPTH * tags):
        raise DataError(f"{where}: its elements nest too deep; a page that people read nests less")
    if format_work + rest * open_formats > max(_FORMAT_WORK, _FORMAT_DEPTH * tags):
        raise DataError(f"{where}: formatting is opened and never closed, too often; a page that people read closes it")
