"""The strict reader of binary structures: a length too far, a number too large and a byte too many are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.formats.reader import ByteReader, malformed_error
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason


@pytest.mark.parametrize(("big_endian", "number"), [(False, 0x0201), (True, 0x0102)])
def test_fields_are_read_in_order_in_the_byte_order_of_the_format(big_endian, number):
    reader = ByteReader(b"\x01\x02ab\0\0", "thing", big_endian=big_endian)

    assert reader.read_unsigned(2) == number
    assert (reader.position, reader.bytes_left) == (2, 4)
    assert reader.take_bytes(2) == b"ab"
    reader.skip_zeros(2, "the rest")
    reader.check_end()
    assert reader.bytes_since(1) == b"\x02ab\0\0"


@given(data=st.binary(max_size=40), size=st.integers(0, 60))
def test_exactly_what_is_there_can_be_taken(data, size):
    reader = ByteReader(data, "thing")
    if size <= len(data):
        assert reader.take_bytes(size) == data[:size]
    else:
        with pytest.raises(RefusedEvidenceError, match=f"ends at byte {len(data)}, {size - len(data)} too early"):
            reader.take_bytes(size)
        assert reader.position == 0


@pytest.mark.parametrize(
    ("size", "is_accepted"), [(0, True), (3, True), (4, False)], ids=["empty", "at the limit", "above"]
)
def test_a_length_is_bounded_before_its_bytes_are_taken(size, is_accepted):
    reader = ByteReader(bytes([size]) + b"abcd", "thing")
    if is_accepted:
        assert reader.read_sized(1, 3) == b"abcd"[:size]
    else:
        assert refusal(lambda: reader.read_sized(1, 3)) == "malformed"


def test_a_length_within_the_limit_and_past_the_end_is_refused():
    assert refusal(lambda: ByteReader(b"\x03ab", "thing").read_sized(1, 9)) == "malformed"


@pytest.mark.parametrize("data", [b"\x01\0", b"\0\x80"])
def test_bytes_that_must_be_zero_are_zero(data):
    with pytest.raises(RefusedEvidenceError, match="thing: padding must be zero"):
        ByteReader(data, "thing").skip_zeros(2, "padding")


def test_what_follows_the_end_is_refused_and_counted():
    reader = ByteReader(b"abc", "thing")
    reader.take_bytes(2)

    with pytest.raises(RefusedEvidenceError, match="thing: 1 bytes after its end"):
        reader.check_end()


def test_a_malformed_structure_is_refused_by_its_name():
    error = malformed_error("thing", "no header")

    assert (error.reason, error.detail) == (RefusedEvidenceReason.MALFORMED, "thing: no header")


def test_every_reason_is_its_name_in_lower_case():
    assert {reason.name.lower() for reason in RefusedEvidenceReason} == {
        str(reason) for reason in RefusedEvidenceReason
    }
