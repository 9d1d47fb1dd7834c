"""Books, mail and source code: text found where it is, and what is broken or hostile refused."""

import email.message
import gzip
import io
import itertools
import zipfile

import pytest
from pydantic import ValidationError
from source_records import mutants, raw_total, read_mutants, reasons, records, texts

from phalanx.data.sources import CodeConfig, EpubConfig, MailConfig, open_source
from phalanx.errors import DataError

pytest.importorskip("resiliparse")

CONTAINER = """<?xml version="1.0"?><container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container">
<rootfiles><rootfile full-path="OPS/book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>"""
PACKAGE = """<?xml version="1.0"?><package xmlns="http://www.idpf.org/2007/opf" version="3.0" unique-identifier="i">
<metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>The line &amp; the shield</dc:title>
<dc:language>en</dc:language><dc:rights>CC0</dc:rights></metadata><manifest>
<item id="two" href="text/two%20b.xhtml" media-type="application/xhtml+xml"/>
<item id="one" href="text/one.xhtml" media-type="application/xhtml+xml"/>
<item id="art" href="art.svg" media-type="image/svg+xml"/></manifest>
<spine><itemref idref="one"/><itemref idref="art"/><itemref idref="two"/></spine></package>"""


def page(text):
    return f'<html xmlns="http://www.w3.org/1999/xhtml"><body><h1>{text}</h1><p>Caf\u00e9 {text}.</p></body></html>'


def book(compression=zipfile.ZIP_DEFLATED, **changed):
    """An EPUB; a keyword changes the file of that name, None leaves it out."""
    files = {
        "META-INF/container.xml": CONTAINER,
        "OPS/book.opf": PACKAGE,
        "OPS/text/one.xhtml": page("first"),
        "OPS/text/two b.xhtml": page("second"),
        **{{"container": "META-INF/container.xml", "package": "OPS/book.opf"}.get(k, k): v for k, v in changed.items()},
    }
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, content in files.items():
            if content is not None:
                archive.writestr(zipfile.ZipInfo(name), content, compression)
    return stream.getvalue()


def read(config, path, content):
    path.write_bytes(content)
    return records(config(path=path))


@pytest.mark.parametrize("name", ["a.epub", "a.epub.gz"])
def test_a_book_is_one_document_in_the_order_of_its_spine(tmp_path, name):
    content = book()

    (found,) = read(EpubConfig, tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)

    assert found.text == "first\n\nCaf\u00e9 first.\n\nsecond\n\nCaf\u00e9 second."
    told = {"title": "The line & the shield", "language": "en", "rights": "CC0", "not_read": "art.svg (image/svg+xml)"}
    assert found.fields == told
    assert found.origin.raw_bytes == len(content)


BOMB = """<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;">]><x>&b;</x>"""
READS = """<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><x>&a;</x>"""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no zip", "is no EPUB book (File is not a zip file)"),
        (book()[:-30], "is no EPUB book ("),
        (book(container=None), "lacks its file 'META-INF/container.xml'"),
        (book(container="<x>"), "META-INF/container.xml: is not well-formed XML"),
        (book(container="<x/>"), "META-INF/container.xml names no package"),
        (book(package=BOMB), "OPS/book.opf: declares a document type"),
        (book(package=READS), "OPS/book.opf: declares a document type"),
        (book(package="<a>" * 200), "OPS/book.opf: its elements nest deeper than 100"),
        (book(package=PACKAGE.replace('idref="two"', 'idref="ten"')), "its spine names 'ten', which its manifest"),
        (book(package=PACKAGE.replace("one.xhtml", "../../../../etc/passwd")), "lacks its file '../../etc/passwd'"),
        (book(package=PACKAGE.replace("<itemref", "<x")), "its spine has 0 pages, expected 1 to 10000"),
        (book(zipfile.ZIP_LZMA), "META-INF/container.xml: is packed in a way that EPUB does not know"),
        (book(**{"META-INF/encryption.xml": "<e><EncryptedData/></e>"}), "is encrypted, in part or as a whole"),
        (book(**{"OPS/text/one.xhtml": "x" * 20_000_000}), "OPS/text/one.xhtml: is larger than a book may be"),
        (book(**{"OPS/text/one.xhtml": b"<p>caf\xe9</p><meta charset=utf-8>"}), "OPS/text/one.xhtml: byte 6"),
        (book(**{"OPS/text/one.xhtml": "<div>" * 20_000}), "OPS/text/one.xhtml: its elements nest too deep"),
    ],
)
def test_a_book_that_is_broken_or_hostile_is_one_broken_record(tmp_path, content, said):
    (found,) = read(EpubConfig, tmp_path / "a.epub", content)

    assert found.reason.startswith(said)
    assert found.raw_bytes == len(content)
    with pytest.raises(DataError, match=r"a\.epub: "):
        list(open_source(EpubConfig(path=tmp_path / "a.epub")).documents())


def message(subject="Caf\u00e9", plain="The line is closed.\n", page=None, sender="a@e.org"):
    made = email.message.EmailMessage()
    made["Subject"], made["From"] = subject, sender
    if plain is not None:
        made.set_content(plain)
    if page is not None:
        (made.add_alternative if plain is not None else made.set_content)(page, subtype="html")
    return bytes(made)


def mailbox(*messages):
    return b"".join(b"From a@e.org Mon Jan  1 00:00:00 2026\n" + one + b"\n" for one in messages)


def test_messages_of_a_mailbox_are_documents_and_add_up(tmp_path):
    content = mailbox(message(), message(plain="First.\n\nsays\nFrom here on.\n"), message(subject="Two"))

    found = read(MailConfig, tmp_path / "a.mbox", content)

    assert texts(found) == [
        "Subject: Caf\u00e9\n\nThe line is closed.\n\n",
        "Subject: Caf\u00e9\n\nFirst.\n\nsays\nFrom here on.\n\n",
        "Subject: Two\n\nThe line is closed.\n\n",
    ]
    assert raw_total(found) == len(content)
    assert found[0].fields == {"subject": "Caf\u00e9"}


def test_plain_text_goes_before_a_page_and_a_page_before_nothing(tmp_path):
    html = "<html><body><p>The <b>page</b> says so.</p></body></html>"
    (tmp_path / "a.eml").write_bytes(message(page=html))
    (tmp_path / "b.eml").write_bytes(message(plain=None, page=html))
    (tmp_path / "c.eml").write_bytes(b"Subject: x\nContent-Type: image/png\n\nPNG")

    found = records(MailConfig(path=tmp_path, headers=("From",), main_content=False))

    assert texts(found) == ["From: a@e.org\n\nThe line is closed.\n", "From: a@e.org\n\nThe page says so."]
    assert (found[2].reason, found[2].is_unsupported) == ("a message without text", True)


def test_every_file_of_a_maildir_is_read_where_no_suffix_is_asked_for(tmp_path):
    (tmp_path / "cur").mkdir()
    (tmp_path / "cur" / "1700000000.x:2,S").write_bytes(message())

    assert len(texts(records(MailConfig(path=tmp_path, suffixes=("",))))) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no header\n\ntext", "is no message: it has no header"),
        (
            b"Subject: x\nContent-Type: text/plain; charset=klingon\n\nt\xe9xt",
            "unknown encoding 'klingon'; use a name that browsers know",
        ),
        (b"Subject: x\nContent-Type: text/plain; charset=utf-8\n\ncaf\xe9", "byte 3 (0xe9) is not utf-8"),
        (b"Subject: x\n" + b"Content-Type: multipart/mixed; boundary=b\n\n--b\n" * 100, "has more than 64 boundaries"),
        (
            b"Subject: x\n" + b"Content-Type: message/rfc822\n\n" * 3000,
            "is no message that can be read (RecursionError)",
        ),
    ],
)
def test_a_message_that_cannot_be_read_says_why(tmp_path, content, said):
    (found,) = read(MailConfig, tmp_path / "a.eml", content)

    assert found.reason == said
    assert found.raw_bytes == len(content)


def test_a_message_that_is_too_large_is_counted_and_the_next_one_read(tmp_path):
    path = tmp_path / "a.mbox"
    path.write_bytes(mailbox(message(plain="x" * 70 + "\n" + "y\n" * 3000), message()))

    found = records(MailConfig(path=path, max_record_bytes=2000))

    assert len(texts(found)) == 1
    assert reasons(found)[0].startswith("is larger than a record may be")
    assert raw_total(found) == path.stat().st_size


def test_a_tree_of_code_is_read_by_language_with_its_licences(tmp_path):
    files = {
        "LICENSE": b"MIT License",
        "a.py": b"# SPDX-License-Identifier: Apache-2.0\nprint('caf\xc3\xa9')\n",
        "lib/COPYING.txt": b"GPL",
        "lib/deep/b.C": b"int main(void) { return 0; }\n",
        "Makefile": b"all:\n",
        "notes.xyz": b"not code",
        "c.go": b"// Code generated by protoc. DO NOT EDIT.\npackage c\n",
        "d.js": b"x" * 6000,
        "e.rs": b"fn\0",
        "f.rb": b"caf\xe9",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "link.py").symlink_to("/etc/hostname")

    found = {record.name: record for record in records(CodeConfig(path=tmp_path))}

    told = {name: found.pop(name).reason for name in ("LICENSE", "lib/COPYING.txt", "link.py", "notes.xyz")}
    assert told.pop("link.py").startswith("is a link out of the folder of this source")
    assert set(told.values()) == {"is of no kind that this source reads"}
    assert sorted(found) == ["Makefile", "a.py", "c.go", "d.js", "e.rs", "f.rb", "lib/deep/b.C"]
    assert found["a.py"].fields == {
        "language": "python",
        "path": "a.py",
        "licence": "Apache-2.0",
        "licence_file": "LICENSE",
    }
    assert found["lib/deep/b.C"].fields["licence_file"] == "lib/COPYING.txt"
    assert found["Makefile"].fields["language"] == "make"
    assert {name: found[name].reason for name in ("c.go", "d.js", "e.rs", "f.rb")} == {
        "c.go": "says that a program wrote it (do not edit)",
        "d.js": "has a line of 6000 bytes, which no person writes",
        "e.rs": "is binary",
        "f.rb": "byte 3 (0xe9) is not utf-8",
    }
    assert raw_total(found.values()) == sum(len(files[name]) for name in found)


def test_languages_and_generated_files_are_chosen(tmp_path):
    (tmp_path / "a.py").write_bytes(b"# @generated\n")
    (tmp_path / "b.go").write_bytes(b"package b\n")

    assert texts(records(CodeConfig(path=tmp_path, languages=("python",), generated=True))) == ["# @generated\n"]
    with pytest.raises(ValidationError, match="klingon"):
        CodeConfig(path=tmp_path, languages=("klingon",))


def test_a_book_with_a_changed_package_or_page_is_a_document_or_a_broken_record(tmp_path):
    changed = [
        *(book(package=one) for one in mutants([PACKAGE.encode()], 75, seed=3)),
        *(book(**{"OPS/text/one.xhtml": one}) for one in mutants([page("first").encode()], 75, seed=4)),
    ]

    assert read_mutants(EpubConfig(path=tmp_path / "a.epub"), tmp_path / "a.epub", changed) > 50


SEEDS = {
    "a.mbox": (MailConfig, [mailbox(message(page="<p>x</p>"), message(plain=None, page="<p>x</p>"), message())]),
    "a.py": (CodeConfig, [b"# SPDX-License-Identifier: MIT\nprint('caf\xc3\xa9')\n"]),
}


@pytest.mark.parametrize("name", SEEDS)
def test_mutants_are_documents_or_broken_records(tmp_path, name):
    kind, seeds = SEEDS[name]

    assert read_mutants(kind(path=tmp_path / name), tmp_path / name, mutants(seeds, 150, seed=1)) > 0


def test_a_book_with_changed_bytes_is_a_document_or_a_broken_record(tmp_path):
    changed = mutants([book(), book(zipfile.ZIP_STORED)], 150, seed=1)

    # the checksums of a zip file let next to none through
    assert read_mutants(EpubConfig(path=tmp_path / "a.epub"), tmp_path / "a.epub", changed) < 30


@pytest.mark.slow
def test_ten_thousand_changed_books_are_documents_or_broken_records(tmp_path, memory_growth):
    seeds = [book(), book(zipfile.ZIP_STORED)]
    changed = itertools.chain(
        mutants(seeds, 5_000, seed=5),
        (book(package=one) for one in mutants([PACKAGE.encode()], 2_500, seed=6)),
        (book(**{"OPS/text/one.xhtml": one}) for one in mutants([page("first").encode()], 2_500, seed=7)),
    )

    assert read_mutants(EpubConfig(path=tmp_path / "a.epub"), tmp_path / "a.epub", changed) > 2_000
    assert memory_growth() < 200 << 20


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDS)
def test_ten_thousand_mutants_are_documents_or_broken_records(tmp_path, name, memory_growth):
    kind, seeds = SEEDS[name]

    assert read_mutants(kind(path=tmp_path / name), tmp_path / name, mutants(seeds, 10_000, seed=2)) > 0
    assert memory_growth() < 200 << 20
