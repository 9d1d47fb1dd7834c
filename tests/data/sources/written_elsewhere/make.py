"""Write the files of this folder again: ``python make.py DIR``, with ebooklib 0.20, polars 2.1, warcio 1.8, brotli."""

import gzip
import io
import sys
from pathlib import Path

import brotli
import polars as pl
from ebooklib import epub
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

WORDS = ["A row of text.", "caf\u00e9 \u2603", None, "", "x" * 40, "the same", "the same"]
PAGE = "<html><head><meta charset=utf-8></head><body><p>A p\u00e1gina with a sentence.</p></body></html>".encode()
XHTML = '<html xmlns="http://www.w3.org/1999/xhtml"><head><title/></head><body><p>A page of XHTML.</p></body></html>'
HTML = ("Content-Type", "text/html; charset=utf-8")


def write_book(path: Path) -> None:
    book = epub.EpubBook()
    book.set_identifier("id1")
    book.set_title("A b\u00f6ok")
    book.set_language("en")
    book.add_author("A. Author")
    book.add_author("B. Writer")
    first = epub.EpubHtml(title="First", file_name="chap 01 \u00e9.xhtml")
    first.content = "<h1>First</h1><p>One caf\u00e9.</p>"
    second = epub.EpubHtml(title="Second", file_name="sub/chap02.xhtml")
    second.content = "<html><head><title>x</title></head><body><p>Two.</p><img src='../a.png'/></body></html>"
    art = epub.EpubItem("art", "art.svg", "image/svg+xml", b"<svg xmlns='http://www.w3.org/2000/svg'/>")
    font = epub.EpubItem("font", "fonts/f.otf", "font/otf", b"\0\1" * 50)
    for item in (first, second, art, font, epub.EpubNcx(), epub.EpubNav()):
        book.add_item(item)
    book.toc = (epub.Link("chap 01 \u00e9.xhtml", "First", "i"), second)
    book.spine = ["nav", first, second, ("art", "no")]
    epub.write_epub(str(path), book)


def write_archive(path: Path, *, packed: bool) -> None:
    with path.open("wb") as stream:
        writer = WARCWriter(stream, gzip=packed)

        def add(name: str, body: bytes, *headers: tuple[str, str], status: str = "200 OK") -> None:
            http = StatusAndHeaders(status, list(headers), protocol="HTTP/1.1")
            uri = f"http://example.org/{name}"
            writer.write_record(writer.create_warc_record(uri, "response", io.BytesIO(body), http_headers=http))

        writer.write_record(writer.create_warcinfo_record(path.name, {"software": "warcio"}))
        add("plain", PAGE, HTML)
        add("gzip", gzip.compress(PAGE, mtime=0), HTML, ("Content-Encoding", "gzip"))
        add("brotli", brotli.compress(PAGE), HTML, ("Content-Encoding", "br"))
        add("chunked", b"%x\r\n%s\r\n0\r\n\r\n" % (len(PAGE), PAGE), HTML, ("Transfer-Encoding", "chunked"))
        add("gone", PAGE, HTML, status="404 Not Found")
        add("xhtml", XHTML.encode(), ("Content-Type", "application/xhtml+xml"))
        add("pdf", b"%PDF", ("Content-Type", "application/pdf"))
        add("untyped", PAGE)
        text = io.BytesIO(b"A text of its own.")
        writer.write_record(
            writer.create_warc_record("http://example.org/t", "resource", text, warc_content_type="text/plain")
        )


def main(out: Path) -> None:
    write_book(out / "ebooklib.epub")
    write_archive(out / "warcio.warc", packed=False)
    write_archive(out / "warcio.warc.gz", packed=True)
    table = pl.DataFrame({"text": WORDS, "n": list(range(len(WORDS)))})
    table.write_parquet(out / "polars_lz4.parquet", compression="lz4")
    table.write_parquet(out / "polars_brotli_groups.parquet", compression="brotli", row_group_size=2, statistics=False)
    table.lazy().sink_parquet(out / "polars_streamed.parquet")
    for name, kind in {
        "categorical": pl.Categorical,
        "binary": pl.Binary,
        "enum": pl.Enum(sorted(set(filter(None, WORDS)) | {""})),
    }.items():
        table.with_columns(pl.col("text").cast(kind)).write_parquet(out / f"polars_{name}.parquet")
    table.write_csv(out / "polars.csv", include_bom=True, line_terminator="\r\n", quote_style="always")
    table.write_ndjson(out / "polars.jsonl")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
