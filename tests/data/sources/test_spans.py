"""A file that several processes read: its spans together give the records of the whole file, damage and all."""

import gzip
import io
import json
from dataclasses import replace

import pytest
from source_records import mutants, records

from phalanx.data.sources import DialogueConfig, JsonlConfig, MailConfig, TextConfig, WarcConfig, open_source
from phalanx.data.sources.spans import MemberBorders


def warc_record(number, end=b"\r\n\r\n"):
    body = f"Text {number} of an archive, a line that is long enough to stand for a page.".encode()
    return (
        b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Type: text/plain\r\n"
        + f"WARC-Target-URI: http://e.org/{number}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
        + end
    )


LINES = b"".join(json.dumps({"text": f"line {number}"}).encode() + b"\n" for number in range(12))
PARTS = b"<|end|>".join(b"part %d\nof a text" % number for number in range(9)) + b"<|end|>"
MAILS = b"".join(b"From me\nSubject: %d\n\nA text, and a line\nFrom here on.\n\n" % number for number in range(8))
TURNS = b"".join(json.dumps({"instruction": "a", "output": str(number)}).encode() + b"\n" for number in range(9))
ARCHIVE = b"".join(map(warc_record, range(6))) + warc_record(6, b"\n") + warc_record(7, b"\n\n") + warc_record(8)
MEMBERS = b"".join(gzip.compress(warc_record(number), mtime=0) for number in range(8))
CASES = {
    "a.jsonl": (JsonlConfig, {}, LINES),
    "b.jsonl": (DialogueConfig, {}, TURNS),
    "a.txt": (TextConfig, {"delimiter": "<|end|>"}, PARTS),
    "b.txt": (TextConfig, {"delimiter": "\n"}, PARTS.replace(b"\n", b"\r\n")),
    "a.mbox": (MailConfig, {}, MAILS),
    "a.warc": (WarcConfig, {}, ARCHIVE),
    "a.warc.gz": (WarcConfig, {}, MEMBERS),
    "a.jsonl.gz": (
        JsonlConfig,
        {},
        b"\0\0".join(gzip.compress(part, mtime=0) for part in (LINES[:150], LINES[150:])),
    ),
}


def read_in_spans(config, min_bytes):
    """Every record of a source, span by span; and how many spans there were."""
    source = open_source(config)
    (file,) = source.files
    spans = source.cut_spans(file, min_bytes)
    parts = [replace(file, span=span) for span in spans] or [file]
    return [record for part in parts for record in source.read_file_records(part)], len(spans)


@pytest.mark.parametrize("min_bytes", [1, 200])
@pytest.mark.parametrize("name", [name for name in CASES if name != "a.jsonl.gz"])
def test_spans_give_the_records_of_the_whole_file(tmp_path, name, min_bytes):
    kind, keys, content = CASES[name]
    (tmp_path / name).write_bytes(content)
    config = kind(path=tmp_path / name, **keys)

    found, count = read_in_spans(config, min_bytes)

    assert found == records(config)
    assert 1 < count <= len(content) // min_bytes + 1


@pytest.mark.parametrize("name", CASES)
def test_damage_changes_nothing_about_that(tmp_path, name):
    kind, keys, content = CASES[name]
    path = tmp_path / name
    config, cut = kind(path=path, max_record_bytes=300, **keys), 0

    for changed in mutants([content], 120, seed=4):
        path.write_bytes(changed)
        found, spans = read_in_spans(config, 40)
        assert found == records(config)
        cut += spans > 0

    # a packed file that is damaged stays one
    assert cut > 5 or name.endswith(".gz")


def test_a_packed_file_is_cut_where_a_member_ends_behind_a_whole_record_and_nowhere_else(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    config = JsonlConfig(path=path)
    half = LINES.index(b"\n", 100) + 1
    whole, inside, between = ([LINES], [LINES[: half - 5], LINES[half - 5 :]], [LINES[:half], LINES[half:]])

    counts = []
    for members in (whole, inside, between):
        path.write_bytes(b"".join(gzip.compress(member, mtime=0) for member in members))
        found, count = read_in_spans(config, 1)
        assert found == records(config)
        counts.append(count)

    assert counts == [0, 0, 2]


def test_damage_inside_of_members_changes_nothing_about_that(tmp_path):
    path = tmp_path / "a.warc.gz"
    cut = 0

    for changed in mutants([warc_record(0)], 60, seed=3):
        records_of_it = [warc_record(1), changed, warc_record(2), warc_record(3)]
        path.write_bytes(b"".join(gzip.compress(record, mtime=0) for record in records_of_it))
        found, spans = read_in_spans(WarcConfig(path=path), 1)
        assert found == records(WarcConfig(path=path))
        cut += spans > 1

    assert cut > 50


def test_a_file_that_does_not_unpack_as_a_whole_stays_one(tmp_path):
    path = tmp_path / "a.warc.gz"
    path.write_bytes(MEMBERS[:-3])

    found, count = read_in_spans(WarcConfig(path=path), 1)

    assert count == 0
    assert "ends too early" in found[-1].reason


def test_a_text_without_a_delimiter_is_one_record_and_not_cut(tmp_path):
    (tmp_path / "a.txt").write_bytes(PARTS)

    assert read_in_spans(TextConfig(path=tmp_path / "a.txt"), 1)[1] == 0


def test_a_table_is_cut_between_row_groups_and_rows_keep_their_numbers(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    from phalanx.data.sources import ParquetConfig

    rows = {"text": [f"row {number} " + "x" * 50 for number in range(40)], "score": list(range(40))}
    stream = io.BytesIO()
    pq.write_table(pa.table(rows), stream, row_group_size=4, compression="NONE")
    path = tmp_path / "a.parquet"
    config = ParquetConfig(path=path, fields=("score",))
    cut = 0

    for content in (stream.getvalue(), *mutants([stream.getvalue()], 25, seed=9)):
        path.write_bytes(content)
        found, count = read_in_spans(config, 200)
        assert found == records(config)
        cut += count > 2

    assert cut > 5


def test_borders_are_told_once_and_in_order():
    borders = MemberBorders()
    borders.note_member(10, 5)
    borders.note_member(10, 9)
    borders.note_member(20, 14)

    assert [borders.packed_at(at) for at in (0, 4, 10, 15, 20, 21)] == [0, None, 5, None, 14, None]
