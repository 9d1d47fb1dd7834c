"""Files that other tools have written (see `written_elsewhere/make.py`), and books, mail and pages as they come.

The right values are those that were given to the writers; pages in XHTML are what an XML parser makes of them, charsets
what html5lib 1.1 chooses.
"""

import io
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path

import pytest
from source_records import raw_total, reasons, records, texts
from test_books_and_archives_of_others import CONTAINER, ONE, XHTML, package, write

from phalanx.data.sources import (
    CsvConfig,
    EpubConfig,
    HtmlConfig,
    JsonlConfig,
    MailConfig,
    ParquetConfig,
    TextConfig,
    WarcConfig,
)

pytest.importorskip("resiliparse")
pytest.importorskip("fastwarc")

HERE = Path(__file__).parent / "written_elsewhere"
WORDS = ["A row of text.", "caf\u00e9 \u2603", None, "", "x" * 40, "the same", "the same"]
THERE = [word for word in WORDS if word is not None]


@pytest.mark.parametrize("file", sorted(HERE.glob("polars*.parquet")), ids=lambda file: file.stem)
def test_a_table_that_polars_wrote_is_read(file):
    pytest.importorskip("pyarrow")

    found = records(ParquetConfig(path=file, fields=("n",)))

    assert texts(found) == THERE
    assert reasons(found) == ["no text in this row"]
    assert [one.fields["n"] for one in found if hasattr(one, "fields")] == [0, 1, 3, 4, 5, 6]


def test_rows_and_lines_that_polars_wrote_are_read():
    assert texts(records(JsonlConfig(path=HERE / "polars.jsonl"))) == THERE
    found = records(CsvConfig(path=HERE / "polars.csv", template="{text}"))
    # CSV has no other way to say that nothing is there
    assert texts(found) == [word or "" for word in WORDS]
    assert raw_total(found) == (HERE / "polars.csv").stat().st_size


BOOK = "A b\u00f6ok\n\n  1. First\n  2. Second\n\nFirst\n\nOne caf\u00e9.\n\nTwo."


def test_a_book_that_ebooklib_wrote_is_read():
    (found,) = records(EpubConfig(path=HERE / "ebooklib.epub"))

    assert found.text == BOOK
    assert found.fields == {
        "title": "A b\u00f6ok",
        "language": "en",
        "creator": "A. Author; B. Writer",
        "not_read": "art.svg (image/svg+xml)",
    }


def members():
    with zipfile.ZipFile(HERE / "ebooklib.epub") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(path, files):
    """Pack files under names in bytes, as archivers do that do not say what their names are in."""
    stream, names = io.BytesIO(), {}
    with zipfile.ZipFile(stream, "w") as archive:
        for number, (name, content) in enumerate(files.items()):
            wanted = name if isinstance(name, bytes) else name.encode()
            plain = f"{number:03}".ljust(len(wanted), "Q")
            names[plain.encode()] = wanted
            archive.writestr(zipfile.ZipInfo(plain), content)
    packed = stream.getvalue()
    for plain, wanted in names.items():
        assert packed.count(plain) == 2
        packed = packed.replace(plain, wanted)
    path.write_bytes(packed)


APPLE = b"\0\5\x16\7\0\2\0\0Mac OS X        "
PACKED = {
    "macOS, the book": lambda files: {
        "__MACOSX/._EPUB": APPLE,
        "__MACOSX/EPUB/._content.opf": APPLE,
        ".DS_Store": b"\0\0\0\1Bud1",
        "EPUB/": b"",
        **files,
    },
    "macOS, its folder": lambda files: {
        "My Book.epub/": b"",
        "__MACOSX/._My Book.epub": APPLE,
        "__MACOSX/My Book.epub/META-INF/._container.xml": APPLE,
        **{f"My Book.epub/{name}": content for name, content in files.items()},
    },
    "Windows, backslashes": lambda files: {name.replace("/", "\\"): content for name, content in files.items()},
    "Windows, its folder": lambda files: {
        f"My Book\\{name}".replace("/", "\\"): content for name, content in files.items()
    },
    "names in cp437": lambda files: {name.encode("cp437"): content for name, content in files.items()},
    "names in cp1252": lambda files: {name.encode("cp1252"): content for name, content in files.items()},
    "names in UTF-8, not marked": lambda files: {name.encode(): content for name, content in files.items()},
    "other case": lambda files: {name.replace("META-INF", "meta-inf"): content for name, content in files.items()},
}


@pytest.mark.parametrize("name", PACKED)
def test_a_book_that_was_packed_again_is_read(tmp_path, name):
    files = PACKED[name](members())
    zipped(tmp_path / "a.epub", files)

    (found,) = texts(records(EpubConfig(path=tmp_path)))

    assert found == BOOK


def test_a_book_behind_other_bytes_is_read(tmp_path):
    (tmp_path / "a.epub").write_bytes(b"MZ" + bytes(100) + (HERE / "ebooklib.epub").read_bytes())

    assert texts(records(EpubConfig(path=tmp_path))) == [BOOK]


def test_an_encrypted_page_is_found_under_any_name(tmp_path):
    encryption = (
        '<encryption><EncryptedData><EncryptionMethod Algorithm="aes"/><CipherData><CipherReference '
        'URI="EPUB/sub/chap02.xhtml"/></CipherData></EncryptedData></encryption>'
    )
    files = members() | {"META-INF/encryption.xml": encryption.encode()}
    for number, rename in enumerate(("\\", "/")):
        zipped(tmp_path / f"{number}.epub", {f"Book/{name}".replace("/", rename): one for name, one in files.items()})

    found = records(EpubConfig(path=tmp_path))

    assert texts(found) == []
    assert all(reason.startswith("is encrypted, in part or as a whole") for reason in reasons(found))


def test_the_package_is_chosen_by_its_type(tmp_path):
    container = CONTAINER.format("OPS/book.opf").replace(
        "<rootfiles>", '<rootfiles><rootfile full-path="book.pdf" media-type="application/pdf"/>'
    )
    write(tmp_path / "a.epub", package(("one.xhtml", XHTML)), ONE)
    with zipfile.ZipFile(tmp_path / "a.epub") as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    zipped(tmp_path / "a.epub", files | {"META-INF/container.xml": container.encode(), "book.pdf": b"%PDF"})

    assert texts(records(EpubConfig(path=tmp_path))) == ["First."]


OPEN = '<?xml version="1.0" encoding="utf-8"?><html xmlns="http://www.w3.org/1999/xhtml">'
PAGES = {
    "empty title": f"{OPEN}<head><title/></head><body><p>First.</p><p>Two.</p></body></html>",
    "empty script": f'{OPEN}<head><script src="a.js"/></head><body><p>First.</p><p>Two.</p></body></html>',
    "empty style": f"{OPEN}<head><style/></head><body><p>First.</p><p>Two.</p></body></html>",
    "empty frame": f'{OPEN}<body><p>First.</p><iframe src="x"/><p>Two.</p></body></html>',
    "empty text area": f"{OPEN}<body><p>First.</p><textarea/><p>Two.</p></body></html>",
    "never closed in HTML": f"{OPEN}<body><p>First.</p><plaintext/><p>Two.</p></body></html>",
    "empty anchors": f'{OPEN}<body><a id="p"/><p>First.</p><div/><span/><p>Two.</p></body></html>',
    "prefix": '<h:html xmlns:h="http://www.w3.org/1999/xhtml"><h:body><h:p>First.</h:p><h:p>Two.</h:p></h:body></h:html>',
    "CDATA": f"{OPEN}<body><p><![CDATA[First.]]></p><p>Two.</p></body></html>",
    "script with tags": f"{OPEN}<head><script>if (a &lt; b) '&lt;/script>'</script></head>"
    "<body><p>First.</p><p>Two.</p></body></html>",
    "UTF-16": OPEN.replace("utf-8", "utf-16").encode("utf-16")
    + "<body><p>First.</p><p>Two.</p></body></html>".encode("utf-16-le"),
    "instructions": f"{OPEN}<body><?page n='1'?><p>First.</p><!-- a --><p>Two.</p></body></html>",
    "not well-formed": f"{OPEN}<body><p>First.<p>Two.</body></html>",
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_xhtml_is_read_as_xml(tmp_path, name):
    content = PAGES[name] if isinstance(PAGES[name], bytes) else PAGES[name].encode()
    write(tmp_path / "a.epub", package(("one.xhtml", XHTML)), {"OPS/one.xhtml": content})
    (tmp_path / "b.xhtml").write_bytes(content)

    assert texts(records(EpubConfig(path=tmp_path))) == ["First.\n\nTwo."]
    assert texts(records(HtmlConfig(path=tmp_path))) == ["First.\n\nTwo."]
    if name != "not well-formed":
        words = "".join(ET.fromstring(content).itertext())
        assert "First.Two." in words.replace("if (a < b) '</script>'", "")


def test_entities_of_a_page_are_plain_characters(tmp_path):
    def read(declared, text):
        whole = f"<!DOCTYPE html [{declared}]><html xmlns='http://www.w3.org/1999/xhtml'><body>{text}</body></html>"
        (tmp_path / "a.xhtml").write_text(whole)
        return records(HtmlConfig(path=tmp_path))

    assert texts(read("", "<p>a&nbsp;b &mdash; c</p>")) == ["a\u00a0b \u2014 c"]
    assert texts(read('<!ENTITY who "world">', "<p>Hello &who;</p>")) == ["Hello world"]
    for entity in ('"<b>x</b>"', '"&b;&b;"', 'SYSTEM "file:///etc/passwd"', f'"{"x" * 99}"'):
        (reason,) = reasons(read(f"<!ENTITY who {entity}>", "<p>&who;</p>"))
        assert "declares the entity 'who'" in reason


@pytest.mark.parametrize("file", ["warcio.warc", "warcio.warc.gz"])
def test_an_archive_that_warcio_wrote_is_read(file):
    found = records(WarcConfig(path=HERE / file))

    sentence = "A p\u00e1gina with a sentence."
    assert texts(found) == [sentence, sentence, sentence, "A page of XHTML.", "A text of its own."]
    assert reasons(found) == [
        "warcinfo record",
        "is packed as 'br', which is not read here",
        "HTTP status 404",
        "content of type application/pdf",
        "content of type unknown",
    ]


def test_an_archive_that_was_packed_as_a_whole_is_the_same(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    content = (HERE / "warcio.warc").read_bytes()
    (tmp_path / "a.warc.zst").write_bytes(zstandard.compress(content[:999]) + zstandard.compress(content[999:]))

    found = records(WarcConfig(path=tmp_path))

    assert texts(found) == texts(records(WarcConfig(path=HERE / "warcio.warc")))
    assert raw_total(found) == len(content)


OUTLOOK = """From: "Doe, Jane" <jane@example.org>
Subject: =?Windows-1252?Q?Caf=E9_=96_it=92s?=
MIME-Version: 1.0
X-Mailer: Microsoft Outlook 16.0
Content-Type: multipart/mixed;
\tboundary="----=_NextPart_000_0001_01D5"

This is a multipart message in MIME format.

------=_NextPart_000_0001_01D5
Content-Type: text/plain;
\tcharset="Windows-1252"
Content-Transfer-Encoding: quoted-printable

It=92s a caf=E9 =96 a long line that Outlook has broken at 76 characters=
, here.

Second.
------=_NextPart_000_0001_01D5
Content-Type: application/ms-tnef; name=winmail.dat
Content-Transfer-Encoding: base64

eJ8+IgEA
------=_NextPart_000_0001_01D5--
""".replace("\n", "\r\n")
LONG = "It\u2019s a caf\u00e9 \u2013 a long line that Outlook has broken at 76 characters, here.\n\nSecond."
FLOWED = "Content-Type: text/plain; charset=utf-8; format=flowed"
LETTERS = {
    "Outlook": (OUTLOOK, f"Subject: Caf\u00e9 \u2013 it\u2019s\n\n{LONG}"),
    "quotes of Windows under Latin-1": (
        b"Subject: x\r\nContent-Type: text/plain; charset=iso-8859-1\r\n\r\nIt\x92s \x93quoted\x94\r\n",
        "Subject: x\n\nIt\u2019s \u201cquoted\u201d",
    ),
    "a subject in raw UTF-8": ("Subject: caf\u00e9 \u2603\n\nhi\n", "Subject: caf\u00e9 \u2603\n\nhi"),
    "a subject in raw Windows-1252": (
        b"Subject: caf\xe9 d\xe9j\xe0 vu\n\nhi\n",
        "Subject: caf\u00e9 d\u00e9j\u00e0 vu\n\nhi",
    ),
    "flowed": (
        f"Subject: x\n{FLOWED}\n\nA line that is \nflowed on \nand on.\nA new one.\n"
        "> a quoted \n> line\n>> deeper \n> not\n-- \nMe\n",
        "Subject: x\n\nA line that is flowed on and on.\nA new one.\n> a quoted line\n>> deeper \n> not\n-- \nMe",
    ),
    "flowed in the middle of a word": (
        f"Subject: x\n{FLOWED}; DelSp=Yes\n\nA line that is f \nlowed.\n From here.\n",
        "Subject: x\n\nA line that is flowed.\nFrom here.",
    ),
    "UTF-7": ("Subject: x\nContent-Type: text/plain; charset=utf-7\n\nHi +Jjo-\n", "Subject: x\n\nHi \u263a"),
    "a mark of UTF-8": ("\ufeffSubject: x\n\nBody.\n", "Subject: x\n\nBody."),
    "a mailbox's quoted line": (
        "From a@b Mon Jan 1 00:00:00 2020\nSubject: x\n\n>From here on.\n>>From there.\n> From a reply.\n",
        "Subject: x\n\nFrom here on.\n>From there.\n> From a reply.",
    ),
    "Markdown": ("Subject: x\nContent-Type: text/markdown; charset=utf-8\n\n# Title\n", "Subject: x\n\n# Title"),
    "a digest": (
        "Subject: x\nContent-Type: multipart/digest; boundary=m\n\n"
        "--m\n\nSubject: in1\n\nOne.\n--m\n\nSubject: in2\n\nTwo.\n--m--\n",
        "Subject: x\n\nOne.\n\nTwo.",
    ),
    "Japanese in two words": (
        "Subject: =?iso-2022-jp?B?GyRCRnwbKEI=?=\n =?iso-2022-jp?B?GyRCS1wbKEI=?=\n\nhi\n",
        "Subject: \u65e5\u672c\n\nhi",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LETTERS)
def test_mail_is_what_a_program_for_mail_shows(tmp_path, name):
    content, expected = LETTERS[name]
    (tmp_path / "a.eml").write_bytes(content if isinstance(content, bytes) else content.encode())

    (found,) = texts(records(MailConfig(path=tmp_path)))

    assert found.strip("\n") == expected


@pytest.mark.parametrize("kind", ["ms-tnef", "pkcs7-mime"])
def test_mail_whose_text_is_packed_is_told_and_is_no_empty_document(tmp_path, kind):
    head = f"Subject: x\nContent-Type: application/{kind}\nContent-Transfer-Encoding: base64\n\neJ8+IgEA\n"
    (tmp_path / "a.eml").write_text(head)

    assert reasons(records(MailConfig(path=tmp_path))) == ["a message without text"]


CHARSETS = {
    "Shift_JIS": (b"<meta charset=shift_jis><p>%s", "\u65e5\u672c\u8a9e\u2460", "cp932"),
    "KS C 5601": (b"<meta charset=ks_c_5601-1987><p>%s", "\ud55c\uad6d\uc5b4 \ub620", "cp949"),
    "Big5 of Hong Kong": (b"<meta charset=big5><p>%s", "\u9999\u6e2f\u5605", "big5hkscs"),
    "a name that only browsers know": (b"<meta charset=x-sjis><p>%s", "\u65e5\u672c", "cp932"),
    "the content first": (
        b"<meta content='text/html; charset=windows-1251' http-equiv='Content-Type'><p>%s",
        "\u041f\u0440\u0438",
        "cp1251",
    ),
    "quotes and spaces": (b"<META\n CHARSET = \"ISO-8859-2\" ><p>%s", "\u0105", "iso8859-2"),
    "UTF-16 that cannot be": (b"<meta charset=utf-16><p>%s", "caf\u00e9", "utf-8"),
    "in a script, then a real one": (
        b"<script>'<meta charset=windows-1251>'</script><meta charset=iso-8859-2><p>%s", "\u0105", "iso8859-2"
    ),
    "in a title, then a real one": (
        b"<title><meta charset=windows-1251></title><meta charset=iso-8859-2><p>%s", "\u0105", "iso8859-2"
    ),
    "of XML": (b"<?xml version='1.0' encoding='koi8-r'?><p>%s", "\u041f\u0440\u0438\u0432\u0435\u0442", "koi8-r"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHARSETS)
def test_a_page_is_read_in_the_charset_that_browsers_choose(tmp_path, name):
    template, text, codec = CHARSETS[name]
    (tmp_path / "a.html").write_bytes(template % text.encode(codec))

    found = texts(records(HtmlConfig(path=tmp_path)))

    assert [one.splitlines()[-1] for one in found] == [text]


@pytest.mark.parametrize("name", ["hz-gb-2312", "ISO-2022-KR", "iso-2022-cn-ext", "replacement"])
def test_a_charset_that_browsers_refuse_is_told(tmp_path, name):
    (tmp_path / "a.html").write_bytes(b"<meta charset=%s><p>~{VPND~}" % name.encode())

    assert reasons(records(HtmlConfig(path=tmp_path))) == [
        "is in ISO-2022-KR, ISO-2022-CN or HZ, which no browser reads; convert it to UTF-8"
    ]


@pytest.mark.parametrize("codec", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("order", ["le", "be"])
def test_text_with_a_byte_order_mark_is_read(tmp_path, codec, order):
    content = "caf\u00e9 \u2603".encode(codec if codec == "utf-8-sig" else f"{codec}-{order}")
    mark = b"" if codec == "utf-8-sig" else "\ufeff".encode(f"{codec}-{order}")
    (tmp_path / "a.txt").write_bytes(mark + content)

    assert texts(records(TextConfig(path=tmp_path))) == ["caf\u00e9 \u2603"]


def test_half_a_character_of_utf_16_is_told(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfea\0b")

    assert reasons(records(TextConfig(path=tmp_path))) == ["byte 4 (0x62) is not utf-16-le; convert the file to UTF-8"]
