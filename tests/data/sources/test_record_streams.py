"""A stream is cut into records of bounded size, and what a record says of itself is a bounded claim."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.sources import records
from phalanx.data.sources.records import (
    ColumnSettings,
    FileSettings,
    claims_in,
    is_text,
    read_bounded_line,
    recorded_text,
    split_stream,
)


@given(st.lists(st.text("ab", max_size=9), min_size=1, max_size=6), st.integers(1, 12), st.integers(1, 5))
def test_parts_of_a_stream_are_its_bytes_and_long_ones_only_their_size(parts, limit, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_BLOCK_BYTES", block)

        cut = list(split_stream(io.BytesIO("--".join(parts).encode()), b"--", limit))

    whole = [f"{part}--".encode() for part in parts[:-1]] + [parts[-1].encode()]
    assert cut == [part if len(part) <= limit else len(part) for part in whole]


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", b""), (b"abcd", b"abcd"), (b"abc\nx", b"abc\n"), (b"abcde", 5), (b"abcdefgh\nx", 9)],
)
def test_a_line_above_the_limit_is_passed_over_with_its_size(content, expected, monkeypatch):
    monkeypatch.setattr(records, "_BLOCK_BYTES", 2)
    stream = io.BytesIO(content)

    assert read_bounded_line(stream, 4) == expected
    assert stream.read() == (b"x" if content.endswith(b"\nx") else b"")


def test_claims_of_a_record_are_bounded_and_of_plain_types():
    config = ColumnSettings(path=Path("x.jsonl"), kind="any", fields=("n", "flag", "bad", "far", "list"), url="u")
    record = {"n": 3, "flag": True, "bad": float("nan"), "far": 1 << 63, "list": [1], "u": "https://a.example/x"}

    claims = claims_in(record, config)

    assert (claims.url, claims.fetched_at, dict(claims.fields)) == ("https://a.example/x", None, {"n": 3, "flag": 1})
    assert [recorded_text(value, 3) for value in ("abc", "abcd", "", 7, "\ud800")] == ["abc", None, None, None, None]
    assert is_text("é") and not is_text("\udfff")


def test_keys_that_came_later_are_left_out_at_their_defaults():
    assert FileSettings(path=Path("x"), kind="any").model_dump(mode="json") == {"kind": "any", "path": "x"}
    assert "max_ratio" in FileSettings(path=Path("x"), kind="any", max_ratio=9).model_dump(mode="json")
