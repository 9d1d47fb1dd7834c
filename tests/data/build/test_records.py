"""Records on disk: found by number, and refused when the file is cut or altered."""

import os

import pytest

from phalanx.data.build.records import RecordFile, RecordWriter, decode_document, encode_document
from phalanx.data.sources import Document, Origin
from phalanx.errors import DataError


@pytest.fixture
def records():
    """More bytes than one block has."""
    return [os.urandom(17) + str(number).encode() * 300 for number in range(1500)]


@pytest.fixture
def file(tmp_path, records):
    """A file of them."""
    with RecordWriter(tmp_path / "records") as writer:
        for record in records:
            writer.append_record(record)
    return tmp_path / "records"


def test_records_come_back_in_order_by_number_and_from_one_on(file, records):
    found = RecordFile(file)

    assert len(found) == len(records)
    assert list(found) == records
    assert [found[number] for number in (1499, 0, 700, 701)] == [records[number] for number in (1499, 0, 700, 701)]
    for first in (0, 1, 699, 1499, 1500):
        assert list(found.iterate_from(first)) == records[first:]


def test_no_records_are_a_file_too(tmp_path):
    RecordWriter(tmp_path / "none").close()

    assert list(RecordFile(tmp_path / "none")) == []


@pytest.mark.parametrize("left", [0, 1, 9, 40, -1, -9, -100])
def test_a_file_that_was_cut_is_refused(file, left):
    file.write_bytes(file.read_bytes()[:left])

    with pytest.raises(DataError, match="was truncated or altered"):
        list(RecordFile(file))


@pytest.mark.parametrize("place", [20, 5000, -3, -20, -40])
def test_a_changed_byte_is_refused(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)

    with pytest.raises(DataError, match="was truncated or altered"):
        list(RecordFile(file))


def test_a_document_comes_back_with_origin_and_fields():
    document = Document("a name", 'text "ü" \u2028\n', Origin(9, "00", "https://example.org", None), {"score": 0.5})

    assert decode_document(encode_document(document)) == document
