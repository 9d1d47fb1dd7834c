"""Pages and mail that a stranger makes to cost much more than their size: each is dropped with a reason.

The stranger owns web pages that are crawled, or sends mail; bounds are of processor time, which another process cannot
use up.
"""

import time

import pytest
from source_records import reasons, records

from phalanx.data.sources import HtmlConfig, MailConfig, extraction
from phalanx.data.sources.extraction import PageSettings, TextExtractor
from phalanx.errors import DataError

pytest.importorskip("resiliparse")

COSTLY = {
    "attributes of one element": "<p " + " ".join(f"a{number}=1" for number in range(40_000)) + ">x</p>",
    "attributes that are merged into the body": "".join(f"<body a{number}=1>" for number in range(40_000)),
    "options of one list": "<select>" + "<option>x" * 30_000,
    "articles that are never closed": "<article>x" * 20_000,
    "closing tags in a comment": "<div><!--</div>-->x" * 20_000,
    "closing tags out of scope": "<div><object></div></object>x" * 20_000,
    "ruby that is never closed": "<rtc>x" * 60_000,
}


FEW = {"attributes of one element", "articles that are never closed", "closing tags in a comment"}


@pytest.mark.quick_cases("closing?tags*")
@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in COSTLY]
)
def test_a_page_that_takes_the_square_of_its_size_is_dropped_and_the_next_one_read(tmp_path, monkeypatch, name):
    monkeypatch.setitem(extraction.CPU_SECONDS, "resiliparse", (0.3, 1))
    (tmp_path / "a.html").write_text(COSTLY[name])
    (tmp_path / "b.html").write_text("<p>An honest page is read behind it.</p>" * 500)

    bad, good = records(HtmlConfig(path=tmp_path))

    assert bad.reason.startswith("resiliparse takes more than 0.3 s of a processor")
    assert good.text.startswith("An honest page is read behind it.")


@pytest.mark.parametrize("levels", [3_000, 8_000])
def test_a_page_of_nested_lists_does_not_become_gigabytes_of_indentation(levels):
    page = "<ol>x" * levels

    with pytest.raises(DataError, match=r"times the page, by indentation|takes more memory than a page may"):
        TextExtractor("html", PageSettings(main_content=False)).extract_text(page.encode(), None, "page")


def test_what_is_read_in_a_process_of_its_own_is_what_is_read_here(monkeypatch):
    extractor = TextExtractor("html", PageSettings())
    page = "<main>" + "<p>caf\u00e9 \U0001f6e1 " * 5_000 + "</main>"

    apart = extractor.extract_text(page.encode(), None, "page")
    monkeypatch.setattr("phalanx.data.sources.extraction._FREE_CHARACTERS", len(page))

    assert apart == extractor.extract_text(page.encode(), None, "page") != ""


MAIL = {
    "Content-Type": b"Content-Type: text/plain" + b"; a=b" * 200_000 + b"\n\nx",
    "quotes": b"content-type: text/plain; a=" + b'"\\";' * 100_000 + b"\n\nx",
    "folded": b"Content-Type: text/plain;" + b"\n a*1=b;" * 50_000 + b"\n\nx",
    "of a part": b"Content-Type: multipart/mixed; boundary=a\n\n--a\nContent-Type: image/png"
    + b"; a=b" * 99_000
    + b"\n\n",
    "behind a carriage return": b"A: b\rContent-Type: text/plain" + b"; a=b" * 200_000 + b"\n\nx",
}
PARTS = {
    "parts": b"Content-Type: multipart/mixed; boundary=a\n\n" + b"--a\n\nx\n" * 60_000,
    "reports": b"Content-Type: message/delivery-status\n\n" + b"A: b\n\n" * 60_000,
}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        *((content, "has a header Content-Type of more than 4096 bytes") for content in MAIL.values()),
        *((content, "has more than 50000 lines that may begin a part") for content in PARTS.values()),
    ],
    ids=[*MAIL, *PARTS],
)
def test_a_message_that_its_parser_takes_minutes_for_is_dropped_unparsed(tmp_path, content, reason):
    (tmp_path / "a.eml").write_bytes(content)
    before = time.process_time()

    assert reasons(records(MailConfig(path=tmp_path))) == [reason]
    assert time.process_time() - before < 2
