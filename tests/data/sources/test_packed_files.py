"""Packed files are unpacked in bounded steps, to the byte, and again behind damage."""

import gzip
import importlib
import random
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from source_records import raw_total, reasons, records, texts

from phalanx.data.sources import CsvConfig, JsonlConfig, MailConfig, TextConfig
from phalanx.data.sources.files import SourceFile
from phalanx.data.sources.packed import Damage, open_runs, unpack_bytes
from phalanx.errors import DataError

zstandard = pytest.importorskip("zstandard")

PACK = {".gz": gzip.compress, ".zst": zstandard.compress}


def runs(path, max_ratio=200):
    return [run if isinstance(run, Damage) else run.read() for run in open_runs(SourceFile(path.name, path), max_ratio)]


def line(number):
    return b'{"text": "line %d"}\n' % number


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("members", [1, 3])
def test_what_was_packed_comes_out_whatever_the_number_of_members(tmp_path, suffix, members):
    content = bytes(range(256)) * 300
    path = tmp_path / f"x{suffix}"
    path.write_bytes(b"".join(PACK[suffix](content) for _ in range(members)))

    assert b"".join(runs(path)) == content * members


@pytest.mark.parametrize("suffix", PACK)
def test_a_damaged_member_is_counted_packed_and_the_next_ones_are_read(tmp_path, suffix):
    members = [PACK[suffix](line(number) * 50) for number in range(3)]
    members[1] = members[1][:12] + bytes(len(members[1]) - 12)
    path = tmp_path / f"x{suffix}"
    path.write_bytes(b"".join(members))

    first, damage, last = runs(path)

    assert (first, last) == (line(0) * 50, line(2) * 50)
    assert damage.packed_bytes == len(members[1])
    assert damage.reason.startswith("cannot be read (")


@pytest.mark.parametrize("suffix", PACK)
def test_a_packed_file_that_ends_too_early_says_so(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACK[suffix](b"".join(line(number) for number in range(20_000)))[:-9])

    found = records(JsonlConfig(path=path))

    assert len(texts(found)) > 1000
    assert reasons(found)[-1] == "cannot be read (its packed data ends too early); fetch it again"


@pytest.mark.parametrize(
    ("config", "suffix", "record", "whole"),
    [
        (CsvConfig, "csv", "{},{}\n", "text,noise\n"),
        (lambda **keys: TextConfig(delimiter="\n", **keys), "txt", "{} {}\n", ""),
        (lambda **keys: TextConfig(delimiter="\n", **keys), "txt", "{} {}\r\n", ""),
        (MailConfig, "mbox", "From a@b Thu Jan  1 00:00:00 2026\nSubject: {}\n\n{}\n\n", ""),
    ],
)
def test_what_damage_took_a_part_of_is_counted_and_no_text(tmp_path, config, suffix, record, whole):
    noise = random.Random(0)
    wanted = [record.format(f"word {number}", noise.randbytes(400).hex()) for number in range(400)]
    members = [gzip.compress("".join([whole, *wanted[:200]]).encode()), gzip.compress("".join(wanted[200:]).encode())]
    path = tmp_path / f"a.{suffix}.gz"
    path.write_bytes(members[0][: len(members[0]) // 2] + members[1])
    intact = tmp_path / f"b.{suffix}"
    intact.write_text("".join([whole, *wanted]), encoding="utf-8")

    found = records(config(path=path))

    assert 200 < len(texts(found)) < 400
    assert set(texts(found)) <= set(texts(records(config(path=intact))))
    assert sum("may lack a part" in reason for reason in reasons(found)) == 2


def test_zeros_behind_a_member_are_padding(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"one") + bytes(600) + gzip.compress(b"two") + bytes(9))

    assert b"".join(runs(path)) == b"onetwo"


@pytest.mark.parametrize("suffix", PACK)
def test_a_bomb_is_stopped_by_its_ratio_in_bounded_memory(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACK[suffix](bytes(64 << 20)))
    size = path.stat().st_size

    tracemalloc.start()
    found = records(TextConfig(path=path, max_record_bytes=1 << 20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert reasons(found) == ["unpacks to more than 200 times its size; if it is right, raise max_ratio"]
    assert raw_total(found) < (16 << 20) * 2 + size
    assert peak < 64 << 20


@pytest.mark.parametrize("suffix", PACK)
def test_a_record_larger_than_allowed_is_counted_and_the_next_one_read(tmp_path, suffix):
    content = b'{"text": "' + b"x" * 5_000_000 + b'"}\n' + line(1)
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACK[suffix](content))

    found = records(JsonlConfig(path=path, max_record_bytes=1000, max_ratio=10_000))

    assert texts(found) == ["line 1"]
    assert reasons(found) == ["is larger than a record may be, 1000 bytes; if it is right, raise max_record_bytes"]
    assert raw_total(found) == len(content)


def test_a_run_file_is_told_of_damage(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(b"no gzip")

    from phalanx.data.sources import open_source

    with pytest.raises(DataError, match=r"a\.jsonl\.gz: cannot be read"):
        list(open_source(JsonlConfig(path=path)).documents())


def test_zst_without_the_extra_names_it(tmp_path, monkeypatch):
    path = tmp_path / "a.txt.zst"
    path.write_bytes(zstandard.compress(b"x"))

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)

    with pytest.raises(DataError, match=r"install phalanx-train\[data\]"):
        records(TextConfig(path=path))


@pytest.mark.parametrize(
    ("coding", "packed"),
    [
        ("gzip", gzip.compress(b"page")),
        ("deflate", zlib.compress(b"page")),
        ("deflate", zlib.compress(b"page")[2:-4]),
        ("zstd", zstandard.compress(b"page")),
    ],
)
def test_the_body_of_a_page_is_unpacked_as_its_header_says(coding, packed):
    assert unpack_bytes(packed, coding, 4) == b"page"
    with pytest.raises(DataError, match="unpacks to more than 3 bytes"):
        unpack_bytes(packed, coding, 3)


def test_the_body_of_a_page_that_is_damaged_or_packed_unknown_is_refused():
    with pytest.raises(DataError, match="its gzip content is damaged"):
        unpack_bytes(gzip.compress(b"page")[:-2], "gzip", 100)
    with pytest.raises(DataError, match="packed as 'br', which is not read here"):
        unpack_bytes(b"page", "br", 100)


@given(content=st.binary(max_size=400), suffix=st.sampled_from(sorted(PACK)))
def test_any_bytes_are_streams_and_damage(tmp_path_factory, content, suffix):
    path = tmp_path_factory.mktemp("any") / f"x{suffix}"
    path.write_bytes(PACK[suffix](b"good") + content)

    found = runs(path)

    assert b"".join(run for run in found if isinstance(run, bytes)).startswith(b"good")
    assert sum(run.packed_bytes for run in found if isinstance(run, Damage)) <= len(content)
