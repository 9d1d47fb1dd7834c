"""Text, JSON lines and pages as a build reads them: whole, broken, and counted to the byte."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from source_records import mutants, raw_total, read_mutants, reasons, records, texts

from phalanx.config import load_config
from phalanx.data.sources import HtmlConfig, JsonlConfig, TextConfig, open_source
from phalanx.data.sources.extraction import PageSettings, TextExtractor
from phalanx.errors import DataError

pytest.importorskip("resiliparse")

PAGE = """<html><head><title>x</title></head><body><nav>menu</nav><main><h1>Shields</h1>
<p>Hold the caf\u00e9, and keep the line closed until the others are there.</p></main></body></html>"""


def test_a_text_file_is_one_record_with_the_digest_of_its_bytes(tmp_path):
    content = "\ufeffcaf\u00e9".encode()
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "b.txt").write_bytes(b"ok \xe9")

    good, bad = records(TextConfig(path=tmp_path))

    assert (good.name, good.text) == ("a.txt", "caf\u00e9")
    assert good.origin.raw_bytes == len(content)
    assert good.origin.raw_digest == hashlib.sha256(content).hexdigest()
    assert (bad.name, bad.raw_bytes, bad.is_unsupported) == ("b.txt", 4, False)
    assert bad.reason == "byte 3 (0xe9) is not utf-8; convert the file to UTF-8"


@given(parts=st.lists(st.text(alphabet="ab-\u00e9", max_size=9), min_size=1, max_size=6))
def test_parts_add_up_to_the_file(tmp_path_factory, parts):
    path = tmp_path_factory.mktemp("parts") / "a.txt"
    path.write_text("--".join(parts), encoding="utf-8")

    found = records(TextConfig(path=path, delimiter="--"))

    assert texts(found) == "--".join(parts).split("--")
    assert raw_total(found) == path.stat().st_size
    assert texts(found) == [
        document.text for document in open_source(TextConfig(path=path, delimiter="--")).documents()
    ]


@pytest.mark.parametrize(
    ("delimiter", "parts"), [("\n\n", ["one\r\ntwo", "three", "four"]), ("\n", ["one", "two", ""])]
)
def test_a_delimiter_of_lines_cuts_files_of_windows_too(tmp_path, monkeypatch, delimiter, parts):
    path = tmp_path / "a.txt"
    path.write_bytes((delimiter.join(parts)).replace("\r\n", "\n").replace("\n", "\r\n").encode())

    for block in (1, 2, 3, 1 << 20):
        monkeypatch.setattr("phalanx.data.sources.records._BLOCK_BYTES", block)
        found = records(TextConfig(path=path, delimiter=delimiter))
        assert texts(found) == parts
        assert raw_total(found) == path.stat().st_size


def test_a_part_that_is_too_long_is_counted_and_the_next_one_read(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one|" + b"x" * 3_000_000 + b"|three")

    found = records(TextConfig(path=path, delimiter="|", max_record_bytes=100))

    assert texts(found) == ["one", "three"]
    assert [record.name for record in found] == ["a.txt, part 1", "a.txt, part 2", "a.txt, part 3"]
    assert raw_total(found) == path.stat().st_size


def test_lines_of_json_keep_columns_and_add_up_to_the_file(tmp_path):
    path = tmp_path / "a.jsonl"
    good = {"text": "one", "score": 0.5, "safe": True, "tags": [1], "link": "http://e.org/", "at": "2026-01-02"}
    lines = [
        json.dumps(good).encode(),
        b"",
        b"{",
        b'{"text": "\\ud800"}',
        b'{"text": "two", "score": NaN}',
        b'{"n": 1}',
        b'{"text": "three", "text": "four"}',
    ]
    path.write_bytes(b"\r\n".join(lines))

    found = records(JsonlConfig(path=path, fields=("score", "safe", "tags", "none"), url="link", fetched_at="at"))

    assert texts(found) == ["one", "two"]
    assert raw_total(found) == path.stat().st_size
    assert found[0].fields == {"score": 0.5, "safe": 1}
    assert (found[0].origin.url, found[0].origin.fetched_at) == ("http://e.org/", "2026-01-02")
    assert found[4].fields == {}
    assert [(record.name, record.is_unsupported) for record in found[1:4]] == [
        ("a.jsonl, line 2", True),
        ("a.jsonl, line 3", False),
        ("a.jsonl, line 4", False),
    ]
    assert reasons(found)[2] == "holds a lone surrogate, which is not text; repair the document"
    assert reasons(found)[4] == "is not JSON (a key is there twice); expected one object a line"


def test_names_of_fields_in_a_reason_are_cut(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"k" * 10_000 + str(number): 1 for number in range(20)}))

    (reason,) = reasons(records(JsonlConfig(path=path)))

    assert len(reason) <= 303


@pytest.mark.parametrize(
    ("page", "declared"),
    [
        (PAGE.encode(), None),
        (PAGE.encode("latin-1"), "iso-8859-1"),
        (PAGE.replace("<title>", '<meta charset="windows-1252"><title>').encode("cp1252"), None),
        (PAGE.encode("utf-16"), None),
        (b"\xef\xbb\xbf" + PAGE.encode(), "latin-1"),
        (PAGE.encode("cp1252"), None),
    ],
)
def test_a_page_is_decoded_by_its_mark_header_declaration_or_what_is_found(page, declared):
    text = TextExtractor("html", PageSettings()).extract_text(page, declared, "page")

    assert "Hold the caf\u00e9" in text
    assert "menu" not in text


@pytest.mark.parametrize(
    ("page", "declared", "said"),
    [
        (b"caf\xe9", "utf-8", r"page: byte 3 \(0xe9\) is not utf-8"),
        (b"\xa4\xa2\xff", "euc-jp", r"page: byte 2 \(0xff\) is not euc-jp"),
        (b"caf\xd2", "windows-1253", r"page: byte 3 \(0xd2\) is not cp1253"),
    ],
)
def test_a_page_that_is_not_what_it_says_is_refused(page, declared, said):
    with pytest.raises(DataError, match=said):
        TextExtractor("html", PageSettings()).extract_text(page, declared, "page")


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("<div>" * 20_000 + "x", "nest too deep"),
        ("<div>" * 2_000 + "<span>x</span>" * 20_000, "nest too deep"),
        (
            "<p>" + "".join(f"<b id={n}>" for n in range(2_000)) + "<p>x" * 2_000,
            "formatting is opened and never closed",
        ),
        ("<div><i>" * 3_000 + "<p>x" * 3_000, "nest too deep|never closed"),
    ],
)
def test_a_page_that_would_cost_seconds_or_gigabytes_is_refused(page, said):
    with pytest.raises(DataError, match=said):
        TextExtractor("html", PageSettings()).extract_text(page.encode(), None, "page")


def test_a_long_page_that_people_read_is_not_refused():
    rows = "".join(f"<div class=r><p><b>{n}</b> <a href=x>a link</a></p></div>" for n in range(5_000))

    text = TextExtractor("html", PageSettings(main_content=False)).extract_text(
        ("<html><body>" + "<div>" * 20 + rows + "</div>" * 20).encode(), None, "page"
    )

    assert "4999" in text


def test_both_extractors_find_the_text_by_one_switch(tmp_path):
    pytest.importorskip("trafilatura")
    paragraphs = "".join(f"<p>Sentence {n} says that shields are kept closed, and why.</p>" for n in range(9))
    (tmp_path / "a.html").write_text(f"<html><body><nav>menu</nav><article>{paragraphs}</article></body></html>")

    found = [records(HtmlConfig(path=tmp_path, extractor=name)) for name in ("resiliparse", "trafilatura")]

    assert all("Sentence 8 says" in texts(one)[0] and "menu" not in texts(one)[0] for one in found)
    assert raw_total(found[0]) == raw_total(found[1]) == (tmp_path / "a.html").stat().st_size


def test_an_address_of_a_store_stays_one_and_a_path_becomes_one(tmp_path):
    file = tmp_path / "x.toml"
    found = []
    for place in ("s3://bucket/folder", "texts/mine"):
        file.write_text(f'kind = "text"\npath = "{place}"\n')
        found.append(load_config(file, TextConfig).path)

    assert found[0] == "s3://bucket/folder"
    assert found[1] == type(tmp_path)("texts/mine")


SEEDS = {
    "a.jsonl": (JsonlConfig, [b'{"text": "one", "n": [1, {"a": 2.5e3}]}\n\n{"text": "t\\u00e9"}\n{"text": 5}\n']),
    "a.txt": (TextConfig, ["one caf\u00e9\n\ntwo".encode()]),
    "a.html": (HtmlConfig, [PAGE.encode(), PAGE.replace("<title>", '<meta charset="latin1"><title>').encode()]),
}


@pytest.mark.parametrize("name", SEEDS)
def test_mutants_are_documents_or_broken_records(tmp_path, name):
    kind, seeds = SEEDS[name]

    assert read_mutants(kind(path=tmp_path / name), tmp_path / name, mutants(seeds, 150, seed=1)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDS)
def test_ten_thousand_mutants_are_documents_or_broken_records(tmp_path, name, memory_growth):
    kind, seeds = SEEDS[name]

    assert read_mutants(kind(path=tmp_path / name), tmp_path / name, mutants(seeds, 10_000, seed=2)) > 0
    assert memory_growth() < 200 << 20
