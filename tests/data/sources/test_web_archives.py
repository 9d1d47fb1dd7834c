"""Web archives: every byte in one record, whatever is broken, and the claims of the archive kept as claims."""

import gzip
import hashlib
import io
import re
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from source_records import mutants, raw_bytes, raw_total, read_mutants, reasons, records, texts

from phalanx.data.rules import Page, Quarantine
from phalanx.data.scan.split_view import SplitView, SplitViewConfig
from phalanx.data.sources import BrokenRecord, Document, WarcConfig, open_source
from phalanx.data.sources.warc import _cut_archive
from phalanx.errors import DataError

pytest.importorskip("fastwarc")
pytest.importorskip("resiliparse")
writer = pytest.importorskip("warcio.warcwriter")
status = pytest.importorskip("warcio.statusandheaders")

# warcio leaves its temporary files to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
HTML = ("Content-Type", "text/html; charset=utf-8")


def page(number):
    return (
        f"<html><body><nav>menu</nav><main><p>Page {number} says that the line is caf\u00e9 closed.</p></main>"
        "</body></html>"
    ).encode()


def archive(*replies, packed=False):
    """A WARC file: one record that says what it is, then (status, headers, body) of each reply."""
    stream = io.BytesIO()
    out = writer.WARCWriter(stream, gzip=packed)
    out.write_record(out.create_warcinfo_record("made.warc", {"software": "test"}))
    for number, (code, headers, body) in enumerate(replies):
        http = status.StatusAndHeaders(code, headers, protocol="HTTP/1.1")
        out.write_record(
            out.create_warc_record(
                f"http://e.org/{number}",
                "response",
                payload=io.BytesIO(body),
                http_headers=http,
                warc_headers_dict={"WARC-Date": "2026-01-02T03:04:05Z"},
            )
        )
    return stream.getvalue()


def pages(count, **options):
    return archive(*(("200 OK", [HTML], page(number)) for number in range(count)), **options)


def read(tmp_path, content, name="a.warc", **keys):
    path = tmp_path / name
    path.write_bytes(content)
    return records(WarcConfig(path=path, **keys))


def starts(content):
    return [found.start() for found in re.finditer(rb"WARC/1\.0\r\n", content)]


@pytest.mark.parametrize("packed", [False, True])
def test_an_archive_is_read_with_its_claims_and_adds_up(tmp_path, packed):
    content = pages(3, packed=packed)

    found = read(tmp_path, content, "a.warc.gz" if packed else "a.warc")

    info, first, *_ = found
    assert (info.reason, info.is_unsupported) == ("warcinfo record", True)
    assert texts(found) == [f"Page {number} says that the line is caf\u00e9 closed." for number in range(3)]
    assert first.name == ("a.warc.gz, record 2" if packed else "a.warc, record 2")
    assert (first.origin.url, first.origin.fetched_at) == ("http://e.org/0", "2026-01-02T03:04:05Z")
    assert first.origin.recorded_digest.startswith("sha1:")
    assert first.origin.digest_holds is True
    assert raw_total(found) == len(gzip.decompress(content) if packed else content)


def test_a_digest_that_is_not_that_of_the_payload_is_told(tmp_path):
    content = pages(1)
    at = content.index(b"WARC-Payload-Digest: sha1:") + len(b"WARC-Payload-Digest: sha1:")
    other = content[:at] + b"A" * 32 + content[at + 32 :]

    (document,) = (record for record in read(tmp_path, other) if isinstance(record, Document))

    assert document.origin.recorded_digest == "sha1:" + "A" * 32
    assert document.origin.digest_holds is False


def test_the_scan_for_split_views_compares_the_payload_with_what_was_recorded(tmp_path):
    content = pages(1)
    at = content.index(b"WARC-Payload-Digest: sha1:") + len(b"WARC-Payload-Digest: sha1:")
    honest, other = content, content[:at] + b"A" * 32 + content[at + 32 :]
    scan = SplitView(SplitViewConfig(without_digest="quarantine"))

    outcomes = []
    for one in (honest, other):
        (document,) = (record for record in read(tmp_path, one) if isinstance(record, Document))
        assert document.fields["payload_sha256"] == hashlib.sha256(page(0)).hexdigest()
        outcomes.append(scan.judge_page(Page(document, "web")))

    assert outcomes[0] is None
    assert isinstance(outcomes[1], Quarantine)


def test_bodies_are_unpacked_and_put_together_as_their_headers_say(tmp_path):
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(page(1)), page(1))
    content = archive(
        ("200 OK", [HTML, ("Content-Encoding", "gzip")], gzip.compress(page(0))),
        ("200 OK", [HTML, ("Transfer-Encoding", "chunked")], chunked),
        ("200 OK", [("Content-Type", "text/plain; charset=latin-1")], "caf\u00e9".encode("latin-1")),
    )

    found = read(tmp_path, content)

    assert [text.split(" says")[0] for text in texts(found)] == ["Page 0", "Page 1", "caf\u00e9"]
    assert raw_total(found) == len(content)


def test_what_is_no_text_is_counted_and_told_apart_from_what_is_broken(tmp_path):
    content = archive(
        ("200 OK", [("Content-Type", "image/png")], b"\x89PNG"),
        ("404 Not Found", [HTML], page(0)),
        ("200 OK", [HTML], b"<p>caf\xe9</p>"),
        ("200 OK", [HTML, ("Content-Encoding", "br")], b"x"),
    )

    found = read(tmp_path, content)

    assert [(record.reason, record.is_unsupported) for record in found] == [
        ("warcinfo record", True),
        ("content of type image/png", True),
        ("HTTP status 404", True),
        ("byte 6 (0xe9) is not utf-8", False),
        ("is packed as 'br', which is not read here", False),
    ]
    assert raw_total(found) == len(content)


def test_texts_of_a_wet_archive_are_documents(tmp_path):
    stream = io.BytesIO()
    out = writer.WARCWriter(stream, gzip=True)
    record = out.create_warc_record(
        "http://e.org/", "conversion", payload=io.BytesIO("caf\u00e9 closed".encode()), warc_content_type="text/plain"
    )
    out.write_record(record)

    (document,) = read(tmp_path, stream.getvalue(), "a.warc.wet.gz")

    assert (document.text, document.origin.url) == ("caf\u00e9 closed", "http://e.org/")
    assert document.origin.digest_holds is True


def test_a_truncated_archive_ends_in_a_broken_record(tmp_path):
    content = pages(2)[:-60]

    found = read(tmp_path, content)

    assert len(texts(found)) == 1
    assert reasons(found)[-1].startswith("ends too early: its length is ")
    assert raw_total(found) == len(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda record: record.replace(b"Content-Length: ", b"X-Length: ", 1), "has no header that ends"),
        (lambda record: record.replace(b"Content-Length: ", b"Content-Length: -", 1), "has no header that ends"),
        (
            lambda record: record.replace(b"Content-Length: ", b"Content-Length: 1\r\nContent-Length: ", 1),
            "has no header",
        ),
        (
            lambda record: re.sub(rb"Content-Length: \d+", b"Content-Length: 9", record, count=1),
            "its length is not that",
        ),
        (lambda record: b"garbage\n" + record[9:], "is not where a WARC record begins"),
        (lambda record: record[: record.index(b"WARC-Date")], "has no header that ends"),
        (
            lambda record: record.replace(b"\r\n\r\n", b"\r\n" + b"X: y\r\n" * 20_000 + b"\r\n", 1),
            "has no header that ends",
        ),
    ],
)
def test_behind_a_broken_record_the_next_one_is_read(tmp_path, damage, said):
    content = pages(3)
    _, _, second, third = starts(content)
    content = content[:second] + damage(content[second:third]) + content[third:]

    found = read(tmp_path, content)

    assert [text[:6] for text in texts(found)] == ["Page 0", "Page 2"]
    assert sum(said in reason for reason in reasons(found)) == 1
    assert raw_total(found) == len(content)
    with pytest.raises(DataError, match=r"a\.warc, record 3: "):
        list(open_source(WarcConfig(path=tmp_path / "a.warc")).documents())


def test_behind_a_bad_gzip_member_the_next_one_is_read(tmp_path):
    content = bytearray(pages(3, packed=True))
    members = [found.start() for found in re.finditer(rb"\x1f\x8b\x08\x00", content)]
    bad = members[2]
    content[bad + 60 : bad + 90] = bytes(30)

    found = read(tmp_path, bytes(content), "a.warc.gz")

    assert [text[:6] for text in texts(found)] == ["Page 0", "Page 2"]
    (damage,) = (record for record in found if isinstance(record, BrokenRecord) and not record.is_unsupported)
    assert damage.raw_bytes == members[3] - bad
    assert damage.reason.startswith("cannot be read (")


def test_records_and_bodies_that_are_too_large_are_counted_in_bounded_memory(tmp_path):
    bomb = gzip.compress(bytes(100_000_000))
    content = archive(
        ("200 OK", [HTML], b"x" * 5_000_000),
        ("200 OK", [HTML, ("Content-Encoding", "gzip")], bomb),
        ("200 OK", [HTML], page(2)),
    )

    tracemalloc.start()
    found = read(tmp_path, content, max_record_bytes=1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert [text[:6] for text in texts(found)] == ["Page 2"]
    assert [raw_bytes(record) > 5_000_000 for record in found] == [False, True, False, False]
    assert reasons(found)[-1] == "unpacks to more than 1000000 bytes; if it is right, raise max_record_bytes"
    assert raw_total(found) == len(content)
    assert peak < 64 << 20


def test_a_run_file_passes_over_what_is_no_text(tmp_path):
    path = tmp_path / "a.warc"
    path.write_bytes(pages(2))

    assert len(list(open_source(WarcConfig(path=path)).documents())) == 2


@given(cuts=st.lists(st.tuples(st.integers(0, 3000), st.binary(max_size=12)), max_size=4), limit=st.integers(50, 900))
def test_whatever_is_put_into_an_archive_its_records_add_up(cuts, limit):
    content = pages(2)
    for at, put in cuts:
        content = content[:at] + put + content[at + 3 :]

    found = list(_cut_archive(io.BufferedReader(io.BytesIO(content)), limit))

    sizes = [one if isinstance(one, int) else len(one) if isinstance(one, bytes) else one.size for one in found]
    assert sum(sizes) == len(content)


@pytest.mark.parametrize("packed", [False, True])
def test_mutants_are_documents_or_broken_records(tmp_path, packed):
    name = "a.warc.gz" if packed else "a.warc"

    assert (
        read_mutants(WarcConfig(path=tmp_path / name), tmp_path / name, mutants([pages(3, packed=packed)], 150, 1)) > 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_ten_thousand_mutants_are_documents_or_broken_records(tmp_path, packed, memory_growth):
    name = "a.warc.gz" if packed else "a.warc"
    seeds = [pages(3, packed=packed)]

    assert read_mutants(WarcConfig(path=tmp_path / name), tmp_path / name, mutants(seeds, 10_000, 2)) > 0
    assert memory_growth() < 200 << 20
