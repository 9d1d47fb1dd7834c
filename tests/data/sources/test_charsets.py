"""Charsets as browsers read them: what a page declares and where, their names, their tables, and UTF-8 that wins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.sources.charsets import codec_of, declared_codec, decode_as
from phalanx.data.sources.extraction import PageSettings, TextExtractor
from phalanx.errors import DataError

pytest.importorskip("resiliparse")


@pytest.mark.parametrize(
    ("head", "codec"),
    [
        (b'<meta charset="utf-8">', "utf-8"),
        (b"<META CHARSET = 'KOI8-R' >", "koi8-r"),
        (b"<meta charset=big5>", "big5hkscs"),
        (b'<meta/charset="gbk"/>', "gb18030"),
        (b'<meta http-equiv="Content-Type" content="text/html; charset=windows-1251">', "cp1251"),
        (b"<meta content=\"text/html;charset='euc-kr'\" http-equiv=content-type>", "cp949"),
        (b'<meta content="text/html; charset=windows-1251">', None),
        (b'<meta http-equiv="refresh" content="text/html; charset=windows-1251">', None),
        (b'<meta name="description" content="charset=iso-8859-2"><meta charset="utf-8">', "utf-8"),
        (b'<meta data-charset="iso-8859-2" name="x">', None),
        (b'<meta name="charset" content="iso-8859-2">', None),
        (b'<!-- <meta charset="iso-8859-2"> --><meta charset="utf-8">', "utf-8"),
        (b'<!--><meta charset="iso-8859-2">', "iso8859-2"),
        (b'<!-- <meta charset="iso-8859-2">', None),
        (b'<a title="<meta charset=koi8-r>"><meta charset=utf-8>', "utf-8"),
        (b"</meta charset=koi8-r><meta charset=utf-8>", "utf-8"),
        (b"<metadata charset=koi8-r><meta charset=utf-8>", "utf-8"),
        (b"<!DOCTYPE html PUBLIC '<meta charset=koi8-r'><meta charset=utf-8>", "utf-8"),
        (b'<meta charset="klingon"><meta charset="shift_jis">', "cp932"),
        (b'<meta charset="utf-16"><p>', "utf-8"),
        (b'<meta charset="x-user-defined"><p>', "cp1252"),
        (b'<?xml version="1.0" encoding="iso-8859-2"?><html>', "iso8859-2"),
        (b"<?xml version='1.0' encoding='utf-16'?><html>", "utf-8"),
        (b' <?xml version="1.0" encoding="iso-8859-2"?><html>', None),
        (b'<?xml version="1.0" encoding="iso-8859-2"?><meta charset="koi8-r">', "koi8-r"),
    ],
)
def test_a_declaration_is_found_where_browsers_look_for_it(head, codec):
    assert declared_codec(head) == codec


WORDS = [b"<", b"meta ", b"charset", b"=", b'"', b"!--", b"-->", b"/", b">", b"?"]


@given(head=st.binary(max_size=300) | st.lists(st.sampled_from(WORDS)).map(b"".join))
def test_any_bytes_at_all_are_looked_through(head):
    codec = declared_codec(head)

    assert codec is None or decode_as(b"a", codec) == "a"


@pytest.mark.parametrize(
    ("content", "name", "text"),
    [
        (b"caf\xe9\x9d", "latin1", "caf\u00e9\x9d"),
        (b"\x80\x81", "iso-8859-1", "\u20ac\x81"),
        (b"\x98", "windows-1251", "\x98"),
        (b"\xa1\xc1\xa1\xc2", "euc-jp", "\uff5e\u2225"),
        (b"\xad\xa1\xb0\xa1\x8e\xb1\x8f\xb0\xa1a", "x-euc-jp", "\u2460\u4e9c\uff71\u4e02a"),
        (b"\x87\x40", "sjis", "\u2460"),
        (b"\x1b$B0!\x1b(B", "iso-2022-jp", "\u4e9c"),
        ("\u9999\u6e2f\u5605".encode("big5hkscs"), "big5", "\u9999\u6e2f\u5605"),
        (b"\xa2\xe3", "gb2312", "\u20ac"),
        (b"\xa4\xe9", "tis-620", "\u0e04\u0e49"),
        (b"\xb0\xa1\x81\x41", "ks_c_5601-1987", "\uac00\uac02"),
        (b"a\xff", "x-user-defined", "a\uf7ff"),
        (b"\xa4", "latin-9", "\u20ac"),
    ],
)
def test_bytes_have_the_characters_of_the_standards_tables(content, name, text):
    codec = codec_of(name)

    assert codec is not None
    assert decode_as(content, codec) == text


@given(text=st.text(st.characters(codec="euc_jp", exclude_characters="\\~\u00a5\u203e"), max_size=20))
def test_what_python_writes_as_euc_jp_is_read_but_for_marks_that_windows_has_otherwise(text):
    found = decode_as(text.encode("euc_jp"), "euc-jp")

    of_python = "\u301c\u2016\u2212\u00a2\u00a3\u00ac\u2014\u00a6\uff3c"
    other = str.maketrans(of_python, "\uff5e\u2225\uff0d\uffe0\uffe1\uffe2\u2015\uffe4\\")
    assert found.translate(other) == text.translate(other)


def decoded(content, declared, *, is_page=True):
    return TextExtractor("html", PageSettings()).decode_page(content, declared, "it", is_page=is_page)


@pytest.mark.parametrize("declared", ["iso-8859-1", "windows-1252", "koi8-r", "ISO-8859-15", "macintosh"])
def test_utf_8_with_characters_of_several_bytes_goes_before_a_charset_of_one_byte(declared):
    text = "Gr\u00f6\u00dfe \u4e2d"

    assert decoded(text.encode(), declared) == text
    assert decoded(b"caf\xe9", declared) != "caf\ufffd"


@pytest.mark.parametrize("declared", ["none", "x-unknown", "klingon", "punycode", "zip", "a\0b", ""])
def test_a_name_that_nobody_knows_counts_for_nothing_in_a_page_and_is_told_in_a_text(declared):
    assert decoded(b"plain", declared) == decoded(b"plain", declared, is_page=False) == "plain"
    assert (
        decoded("caf\u00e9".encode(), declared) == decoded("caf\u00e9".encode(), declared, is_page=False) == "caf\u00e9"
    )
    assert decoded(b'<meta charset="koi8-r">\xc1', declared).endswith("\u0430")
    with pytest.raises(DataError, match="unknown encoding"):
        decoded(b"caf\xe9", declared, is_page=False)


def test_a_mark_goes_before_everything():
    assert decoded(b"\xef\xbb\xbfcaf\xc3\xa9", "koi8-r") == "caf\u00e9"
    assert decoded("caf\u00e9".encode("utf-16"), "utf-8") == "caf\u00e9"
