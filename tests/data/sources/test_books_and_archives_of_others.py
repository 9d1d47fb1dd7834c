"""Books and web archives as other tools write them; the right text is what the standards, or warcio, make of them."""

import gzip
import io
import zipfile
import zlib

import pytest
from source_records import reasons, records, texts

from phalanx.data.sources import EpubConfig, WarcConfig

pytest.importorskip("resiliparse")
pytest.importorskip("fastwarc")
zstandard = pytest.importorskip("zstandard")

XHTML = "application/xhtml+xml"
CONTAINER = (
    '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="{}" media-type="application/oebps-package+xml"/></rootfiles></container>'
)


def page(text):
    return f'<html xmlns="http://www.w3.org/1999/xhtml"><body><p>{text}</p></body></html>'


def package(*items, before="", spine=None):
    listed = "".join(f'<item id="i{n}" href="{href}" media-type="{media}" {more}/>' for n, (href, media, *rest) in
                     enumerate(items) for more in [" ".join(rest)])  # fmt: skip
    order = "".join(f'<itemref idref="i{number}"/>' for number in spine or range(len(items)))
    return f'{before}<package xmlns="http://www.idpf.org/2007/opf"><manifest>{listed}</manifest><spine>{order}</spine></package>'


def write(path, opf, files, place="OPS/book.opf", named=None):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("META-INF/container.xml", CONTAINER.format(named or place))
        archive.writestr(place, opf)
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)


ONE = {"OPS/one.xhtml": page("First.")}
BOOKS = {
    "escaped": (package(("two%20words.xhtml", XHTML)), {"OPS/two words.xhtml": page("First.")}),
    "not escaped": (package(("two words.xhtml", XHTML)), {"OPS/two words.xhtml": page("First.")}),
    "escaped twice": (package(("50%25.xhtml", XHTML)), {"OPS/50%.xhtml": page("First.")}),
    "kept with its escapes": (package(("two%20words.xhtml", XHTML)), {"OPS/two%20words.xhtml": page("First.")}),
    "composed and not": (package(("caf\u00e9.xhtml", XHTML)), {"OPS/cafe\u0301.xhtml": page("First.")}),
    "other case": (package(("One.XHTML", XHTML)), ONE),
    "backslashes": (package(("text\\one.xhtml", XHTML)), {"OPS/text/one.xhtml": page("First.")}),
    "a query": (package(("one.xhtml?page=1", XHTML)), ONE),
    "spaces around it": (package((" one.xhtml ", XHTML)), ONE),
    "a fragment": (package(("one.xhtml#start", XHTML)), ONE),
    "a parent folder": (package(("../one.xhtml", XHTML)), {"one.xhtml": page("First.")}),
    "a media type with more": (package(("one.xhtml", f"{XHTML}; charset=utf-8")), ONE),
    "a media type in capitals": (package(("one.xhtml", XHTML.upper())), ONE),
    "no media type": (package(("one.xhtml", "")), ONE),
    "xml that is a page": (package(("one.xhtml", "application/xml")), ONE),
    "html of older books": (package(("one.xhtml", "text/x-oeb1-document")), ONE),
    "a document type by name": (
        package(("one.xhtml", XHTML), before='<!DOCTYPE package PUBLIC "+//ISBN//DTD OEB 1.2//EN" "p.dtd">'),
        ONE,
    ),
    "a fallback": (
        package(("one.svg", "image/svg+xml", 'fallback="i1"'), ("one.xhtml", XHTML), spine=[0]),
        {**ONE, "OPS/one.svg": "<svg/>"},
    ),
    "an encrypted picture": (
        package(("one.xhtml", XHTML)),
        {**ONE, "META-INF/encryption.xml": '<encryption><EncryptedData><EncryptionMethod Algorithm="aes"/><CipherData>'
         '<CipherReference URI="OPS/a.png"/></CipherData></EncryptedData></encryption>'},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOOKS)
def test_a_book_of_another_writer_is_read(tmp_path, name):
    write(tmp_path / "a.epub", *BOOKS[name])

    assert texts(records(EpubConfig(path=tmp_path))) == ["First."]


@pytest.mark.parametrize("named", ["./OPS/book.opf", "/OPS/book.opf", " OPS/book.opf "])
def test_a_package_is_found_as_writers_name_it(tmp_path, named):
    write(tmp_path / "a.epub", package(("one.xhtml", XHTML)), ONE, named=named)

    assert texts(records(EpubConfig(path=tmp_path))) == ["First."]


def test_what_of_a_spine_is_no_page_is_told(tmp_path):
    opf = package(("one.xhtml", XHTML), ("art.svg", "image/svg+xml"), ("book.pdf", "application/pdf"))
    write(tmp_path / "a.epub", opf, ONE)

    (found,) = records(EpubConfig(path=tmp_path))

    assert found.fields["not_read"] == "art.svg (image/svg+xml), book.pdf (application/pdf)"


def test_a_book_of_which_no_page_is_read_is_no_empty_document(tmp_path):
    write(tmp_path / "a.epub", package(("art.svg", "image/svg+xml")), {"OPS/art.svg": "<svg/>"})

    assert reasons(records(EpubConfig(path=tmp_path))) == ["none of its pages has a text"]


def test_a_book_of_which_a_page_is_encrypted_is_refused(tmp_path):
    reference = '<CipherReference URI="OPS/one.xhtml"/>'
    encryption = (
        f'<encryption><EncryptedData><EncryptionMethod Algorithm="aes"/>{reference}</EncryptedData></encryption>'
    )
    write(tmp_path / "a.epub", package(("one.xhtml", XHTML)), {**ONE, "META-INF/encryption.xml": encryption})

    (reason,) = reasons(records(EpubConfig(path=tmp_path)))

    assert reason == "is encrypted, in part or as a whole: 'OPS/one.xhtml' is a page of it"


BODY = b"<html><body><p>" + b"A page with a sentence that is long enough. " * 9 + b"</p></body></html>"
HALF = len(BODY) // 2


def chunked(body, *, last=b"0\r\n\r\n", more=b""):
    parts = [body[at : at + 50] for at in range(0, len(body), 50)]
    return b"".join(b"%x%s\r\n%s\r\n" % (len(part), more, part) for part in parts) + last


def zstd(body):
    return zstandard.ZstdCompressor().compress(body)


def raw_deflate(body):
    made = zlib.compressobj(wbits=-15)
    return made.compress(body) + made.flush()


TWO = (BODY[:HALF], BODY[HALF:])
SKIPPED = b"\x50\x2a\x4d\x18\x04\0\0\0skip"
GZIP, CHUNKED = "Content-Encoding: gzip", "Transfer-Encoding: chunked"
READ = {
    "gzip": (gzip.compress(BODY), GZIP),
    "two members": (b"".join(map(gzip.compress, TWO)), GZIP),
    "an empty member first": (gzip.compress(b"") + gzip.compress(BODY), GZIP),
    "an empty member last": (gzip.compress(BODY) + gzip.compress(b""), GZIP),
    "padding": (gzip.compress(BODY) + bytes(20), GZIP),
    "two members in chunks": (chunked(b"".join(map(gzip.compress, TWO))), GZIP, CHUNKED),
    "two frames": (b"".join(map(zstd, TWO)), "Content-Encoding: zstd"),
    "a frame that is skipped": (SKIPPED + zstd(BODY) + SKIPPED, "Content-Encoding: zstd"),
    "an empty frame first": (zstd(b"") + zstd(BODY), "Content-Encoding: zstd"),
    "zlib": (zlib.compress(BODY), "Content-Encoding: deflate"),
    "two of zlib": (b"".join(map(zlib.compress, TWO)), "Content-Encoding: deflate"),
    "raw deflate": (raw_deflate(BODY), "Content-Encoding: deflate"),
    "two codings": (gzip.compress(zlib.compress(BODY)), "Content-Encoding: deflate, gzip"),
    "unpacked and not told": (BODY, GZIP),
    "unpacked, said to be deflate": (BODY, "Content-Encoding: deflate"),
    "unpacked, said to be brotli": (BODY, "Content-Encoding: br"),
    "joined and not told": (BODY, CHUNKED),
    "joined and packed": (gzip.compress(BODY), GZIP, CHUNKED),
    "chunks with extensions": (chunked(BODY, more=b";name=value"), CHUNKED),
    "chunks with trailers": (chunked(BODY, last=b"0\r\nExpires: never\r\n\r\n"), CHUNKED),
    "no coding": (BODY, "Content-Encoding: none"),
    "a charset for a coding": (BODY, "Content-Encoding: ISO-8859-1"),
}
REFUSED = {
    "other bytes behind": (gzip.compress(BODY) + b"more", GZIP),
    "a broken second member": (gzip.compress(BODY) + gzip.compress(BODY)[:-9], GZIP),
    "a frame that was cut": (zstd(BODY)[:-5], "Content-Encoding: zstd"),
    "bytes behind a frame": (zstd(BODY) + b"\x01\x02", "Content-Encoding: zstd"),
    "bytes behind the last chunk": (chunked(BODY) + b"and more", CHUNKED),
    "a chunk that is none": (chunked(BODY).replace(b"32\r\n", b"zz\r\n", 3).replace(b"zz\r\n", b"32\r\n", 1), CHUNKED),
    "no last chunk": (chunked(BODY, last=b""), CHUNKED),
    "brotli": (b"\x8b\x02\x80", "Content-Encoding: br"),
}


def archived(path, body, *headers):
    head = "".join(f"{line}\r\n" for line in ("HTTP/1.1 200 OK", "Content-Type: text/html; charset=utf-8", *headers))
    http = head.encode() + b"\r\n" + body
    about = "WARC/1.0\r\nWARC-Type: response\r\nWARC-Record-ID: <urn:uuid:00000000-0000-0000-0000-000000000001>\r\n"
    about += "WARC-Date: 2024-01-01T00:00:00Z\r\nWARC-Target-URI: http://example.org/\r\n"
    about += f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(http)}\r\n\r\n"
    path.write_bytes(about.encode() + http + b"\r\n\r\n")
    return records(WarcConfig(path=path))


@pytest.mark.parametrize("name", READ)
def test_every_part_of_a_body_is_read_and_headers_that_no_longer_fit_do_not_hide_it(tmp_path, name):
    found = archived(tmp_path / "a.warc", *READ[name])

    assert reasons(found) == []
    assert texts(found)[0].count("A page with a sentence that is long enough.") == 9


@pytest.mark.parametrize("name", ["gzip", "joined and packed", "chunks with extensions", "zlib", "no coding"])
def test_the_page_is_the_one_that_warcio_gives(tmp_path, name):
    warcio = pytest.importorskip("warcio.archiveiterator")
    found = archived(tmp_path / "a.warc", *READ[name])

    for record in warcio.ArchiveIterator(io.BytesIO((tmp_path / "a.warc").read_bytes())):
        there = record.content_stream().read()

    assert there == BODY
    assert texts(found)[0].count("long enough") == there.count(b"long enough")


@pytest.mark.parametrize("name", REFUSED)
def test_a_body_of_which_not_all_is_understood_is_refused(tmp_path, name):
    found = archived(tmp_path / "a.warc", *REFUSED[name])

    assert texts(found) == []
    assert len(reasons(found)) == 1
    assert reasons(found)[0].isprintable()
