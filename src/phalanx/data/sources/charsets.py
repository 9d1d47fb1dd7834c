"""Charsets as browsers read them: names and tables of the WHATWG Encoding Standard, and a page's declaration.

Source: WHATWG Encoding Standard, sections 4.2 and 9 to 14; HTML Standard, section 13.2.3.2 (prescan).
"""

import codecs
import re
from collections.abc import Callable, Iterator

_SPACES = b"\t\n\x0c\r "
PRESCANNED_BYTES = 4096
"""Bytes of a page that are searched for a declared encoding; the standard asks for 1,024."""

UNREADABLE = "ISO-2022-KR, ISO-2022-CN or HZ"
"""Charsets that browsers know and refuse: bytes that look harmless in one place are markup in another."""
_NAMES = {
    "utf-8": "unicode-1-1-utf-8 unicode11utf8 unicode20utf8 utf-8 utf8 x-unicode20utf8",
    "ibm866": "866 cp866 csibm866 ibm866",
    "iso8859-2": "csisolatin2 iso-8859-2 iso-ir-101 iso8859-2 iso88592 iso_8859-2 iso_8859-2:1987 l2 latin2",
    "iso8859-3": "csisolatin3 iso-8859-3 iso-ir-109 iso8859-3 iso88593 iso_8859-3 iso_8859-3:1988 l3 latin3",
    "iso8859-4": "csisolatin4 iso-8859-4 iso-ir-110 iso8859-4 iso88594 iso_8859-4 iso_8859-4:1988 l4 latin4",
    "iso8859-5": "csisolatincyrillic cyrillic iso-8859-5 iso-ir-144 iso8859-5 iso88595 iso_8859-5 iso_8859-5:1988",
    "iso8859-6": "arabic asmo-708 csiso88596e csiso88596i csisolatinarabic ecma-114 iso-8859-6 iso-8859-6-e "
    "iso-8859-6-i iso-ir-127 iso8859-6 iso88596 iso_8859-6 iso_8859-6:1987",
    "iso8859-7": "csisolatingreek ecma-118 elot_928 greek greek8 iso-8859-7 iso-ir-126 iso8859-7 iso88597 iso_8859-7 "
    "iso_8859-7:1987 sun_eu_greek",
    "iso8859-8": "csiso88598e csisolatinhebrew hebrew iso-8859-8 iso-8859-8-e iso-ir-138 iso8859-8 iso88598 iso_8859-8 "
    "iso_8859-8:1988 visual csiso88598i iso-8859-8-i logical",
    "iso8859-10": "csisolatin6 iso-8859-10 iso-ir-157 iso8859-10 iso885910 l6 latin6",
    "iso8859-13": "iso-8859-13 iso8859-13 iso885913",
    "iso8859-14": "iso-8859-14 iso8859-14 iso885914",
    "iso8859-15": "csisolatin9 iso-8859-15 iso8859-15 iso885915 iso_8859-15 l9",
    "iso8859-16": "iso-8859-16",
    "koi8-r": "cskoi8r koi koi8 koi8-r koi8_r",
    "koi8-u": "koi8-ru koi8-u",
    "mac-roman": "csmacintosh mac macintosh x-mac-roman",
    "cp874": "dos-874 iso-8859-11 iso8859-11 iso885911 tis-620 windows-874",
    "cp1250": "cp1250 windows-1250 x-cp1250",
    "cp1251": "cp1251 windows-1251 x-cp1251",
    "cp1252": "ansi_x3.4-1968 ascii cp1252 cp819 csisolatin1 ibm819 iso-8859-1 iso-ir-100 iso8859-1 iso88591 "
    "iso_8859-1 iso_8859-1:1987 l1 latin1 us-ascii windows-1252 x-cp1252",
    "cp1253": "cp1253 windows-1253 x-cp1253",
    "cp1254": "cp1254 csisolatin5 iso-8859-9 iso-ir-148 iso8859-9 iso88599 iso_8859-9 iso_8859-9:1989 l5 latin5 "
    "windows-1254 x-cp1254",
    "cp1255": "cp1255 windows-1255 x-cp1255",
    "cp1256": "cp1256 windows-1256 x-cp1256",
    "cp1257": "cp1257 windows-1257 x-cp1257",
    "cp1258": "cp1258 windows-1258 x-cp1258",
    "mac-cyrillic": "x-mac-cyrillic x-mac-ukrainian",
    "gb18030": "chinese csgb2312 csiso58gb231280 gb2312 gb_2312 gb_2312-80 gbk iso-ir-58 x-gbk gb18030",
    "big5hkscs": "big5 big5-hkscs cn-big5 csbig5 x-x-big5",
    "euc-jp": "cseucpkdfmtjapanese euc-jp x-euc-jp",
    "iso2022_jp_ext": "csiso2022jp iso-2022-jp",
    "cp932": "csshiftjis ms932 ms_kanji shift-jis shift_jis sjis windows-31j x-sjis",
    "cp949": "cseuckr csksc56011987 euc-kr iso-ir-149 korean ks_c_5601-1987 ks_c_5601-1989 ksc5601 ksc_5601 "
    "windows-949",
    "utf-16-be": "unicodefffe utf-16be",
    "utf-16-le": "csunicode iso-10646-ucs-2 ucs-2 unicode unicodefeff utf-16 utf-16le",
    "x-user-defined": "x-user-defined",
    UNREADABLE: "csiso2022kr hz-gb-2312 iso-2022-cn iso-2022-cn-ext iso-2022-kr replacement",
}
_ALSO = {"latin-1": "cp1252", "latin-2": "iso8859-2", "latin-9": "iso8859-15", "utf_8": "utf-8"}
"""Names that no browser knows and mail has."""
_BY_NAME = {name: codec for codec, names in _NAMES.items() for name in names.split()} | _ALSO
_SINGLE = frozenset(
    codec for codec in _NAMES if codec.startswith(("iso8859", "cp12", "koi8", "mac", "ibm866")) or codec == "cp874"
)
MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_EUC = re.compile(rb"[\x00-\x7f]+|\x8e[\xa1-\xdf]|\x8f[\xa1-\xfe]{2}|(?:[\xa1-\xfe]{2})+")


def codec_of(name: str) -> str | None:
    """Return the codec of a charset's name; None where no browser knows it."""
    return _BY_NAME.get(name.strip(_SPACES.decode()).lower())


def is_single_byte(codec: str) -> bool:
    """Whether every byte is a character, so that any bytes at all can be read as it."""
    return codec in _SINGLE


def is_utf8(content: bytes) -> bool:
    """Whether bytes are UTF-8 with characters of several bytes, which text of another charset hardly ever is."""
    if content.isascii():
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def decode_as(content: bytes, codec: str) -> str:
    """Decode strictly by the table that browsers have."""
    special: dict[str, Callable[[bytes], str]] = {"euc-jp": _decode_euc_jp, "x-user-defined": _user_defined}
    if codec == UNREADABLE and content:
        raise UnicodeDecodeError(UNREADABLE, content, 0, 1, "is in a charset that no browser reads")
    if codec in special:
        return special[codec](content)
    # bytes that a table of Windows leaves free are control characters to browsers
    return content.decode(codec, "phalanx-c1" if is_single_byte(codec) else "strict")


def _replace_unmapped(exc: UnicodeError) -> tuple[str, int]:
    if not isinstance(exc, UnicodeDecodeError) or not 0x80 <= exc.object[exc.start] <= 0x9F:
        raise exc
    return chr(exc.object[exc.start]), exc.start + 1


codecs.register_error("phalanx-c1", _replace_unmapped)


def _user_defined(content: bytes) -> str:
    return "".join(chr(byte if byte < 0x80 else 0xF700 + byte) for byte in content)


def _decode_euc_jp(content: bytes) -> str:
    """Decode by the tables of Windows, which have rows that Python's EUC-JP lacks."""
    parts, position = [], 0
    for run in _EUC.finditer(content):
        if run.start() != position:
            break
        parts.append(_euc_run(run[0]))
        position = run.end()
    if position < len(content):
        raise UnicodeDecodeError("euc-jp", content, position, position + 1, "is no character")
    return "".join(parts)


def _euc_run(run: bytes) -> str:
    if run[0] < 0x80:
        return run.decode("ascii")
    if run[0] == 0x8E:
        return chr(0xFF61 + run[1] - 0xA1)
    if run[0] == 0x8F:
        return run.decode("euc_jp")
    moved = bytearray()
    for first, second in zip(run[::2], run[1::2], strict=True):
        row, cell = first - 0x21 - 0x80, second - 0x21 - 0x80
        lead = row // 2 + (0x81 if row < 62 else 0xC1)
        trail = (cell + 0x40 + (cell >= 63)) if row % 2 == 0 else cell + 0x9F
        moved += bytes((lead, trail))
    return moved.decode("cp932")


def declared_codec(page: bytes) -> str | None:
    """Return the codec that a page declares in its head, as browsers look for it; None where it declares none."""
    head = page[:PRESCANNED_BYTES]
    # an element goes before text that looks like one: a browser that has read the text begins again at the element
    for skips_text in (True, False):
        for tag, attributes in _opening_tags(head, skips_text=skips_text):
            if tag == b"meta" and (codec := _declared_by(attributes)) is not None:
                return _browser_codec(codec)
    return _declared_as_xml(head)


def _browser_codec(codec: str) -> str:
    # a page in UTF-16 could not say so in ASCII
    return "utf-8" if codec.startswith("utf-16") else "cp1252" if codec == "x-user-defined" else codec


def _declared_as_xml(head: bytes) -> str | None:
    match = re.match(rb"<\?xml\s[^>]*?\sencoding\s*=\s*(\"|')([^\"'>]{1,60})\1", head)
    codec = codec_of(match[2].decode("latin-1")) if match else None
    return None if codec is None else _browser_codec(codec)


def _declared_by(attributes: dict[bytes, bytes]) -> str | None:
    if b"charset" in attributes:
        return codec_of(attributes[b"charset"].decode("latin-1"))
    if attributes.get(b"http-equiv", b"").lower() != b"content-type":
        return None
    match = re.search(rb"charset[\t\n\f\r ]*=[\t\n\f\r ]*(?:\"([^\"]*)\"|'([^']*)'|([^\t\n\f\r ;\"']+))",
                      attributes.get(b"content", b""), re.IGNORECASE)  # fmt: skip
    return None if match is None else codec_of((match[1] or match[2] or match[3] or b"").decode("latin-1"))


def _opening_tags(head: bytes, *, skips_text: bool) -> Iterator[tuple[bytes, dict[bytes, bytes]]]:
    """Yield the opening tags of a head with their attributes; what stands in comments is none.

    Args:
        skips_text: Nor what stands in scripts, titles and other elements that hold text alone.
    """
    position = 0
    while (position := head.find(b"<", position)) >= 0:
        if head.startswith(b"<!--", position):
            comment_end = head.find(b"-->", position + 2)
            position = len(head) if comment_end < 0 else comment_end + 3
            continue
        tag_match = re.compile(rb"</?([A-Za-z][^\t\n\f\r />]*)").match(head, position)
        if tag_match is None:
            # a document type or an instruction goes to its ">"
            position = (
                max(head.find(b">", position), position + 1)
                if head[position + 1 : position + 2] in (b"!", b"/", b"?")
                else position + 1
            )
            continue
        attributes, position = _parse_attributes(head, tag_match.end())
        if not tag_match[0].startswith(b"</"):
            yield (tag := tag_match[1].lower()), attributes
            if skips_text and tag in _TEXT_ELEMENTS:
                close = re.compile(rb"(?i)</" + tag + rb"[\t\n\f\r />]").search(head, position)
                position = len(head) if close is None else close.start()


_TEXT_ELEMENTS = frozenset((b"iframe", b"noembed", b"noframes", b"script", b"style", b"textarea", b"title", b"xmp"))
_ATTRIBUTE = re.compile(
    rb"[\t\n\f\r /]*([^\t\n\f\r />=][^\t\n\f\r />=]*)"
    rb"(?:[\t\n\f\r ]*=[\t\n\f\r ]*(?:\"([^\"]*)\"|'([^']*)'|([^\t\n\f\r >\"'][^\t\n\f\r >]*))?)?"
)


def _parse_attributes(head: bytes, place: int) -> tuple[dict[bytes, bytes], int]:
    attributes: dict[bytes, bytes] = {}
    while (match := _ATTRIBUTE.match(head, place)) is not None:
        attributes.setdefault(match[1].lower(), match[2] or match[3] or match[4] or b"")
        place = match.end()
    return attributes, place
