"""Tables and mail as other tools write them, with the right value from pyarrow and from what a mail program shows."""

import pytest
from source_records import reasons, records, texts

from phalanx.data.sources import MailConfig, ParquetConfig

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("resiliparse")

WORDS = ["A row of text.", "caf\u00e9", None, "", "the same", "the same"]
BYTES = [None if one is None else one.encode() for one in WORDS]
COLUMNS = {
    "string": pa.array(WORDS),
    "large string": pa.array(WORDS, pa.large_string()),
    "string view": pa.array(WORDS, pa.string_view()),
    "binary": pa.array(BYTES, pa.binary()),
    "large binary": pa.array(BYTES, pa.large_binary()),
    "binary view": pa.array(BYTES, pa.binary_view()),
    "dictionary": pa.array(WORDS).dictionary_encode(),
}
WAYS = {
    "plain": {"use_dictionary": False},
    "dictionary": {},
    "delta bytes": {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
    "delta lengths": {"use_dictionary": False, "column_encoding": {"text": "DELTA_LENGTH_BYTE_ARRAY"}},
    "no arrow schema": {"store_schema": False},
    "second pages": {"data_page_version": "2.0", "compression": "ZSTD"},
}


# of dictionaries in deltas pyarrow itself reads nothing
TABLES = [(column, way) for column in COLUMNS for way in WAYS if (column, way[:5]) != ("dictionary", "delta")]


@pytest.mark.parametrize(("column", "way"), TABLES)
def test_every_type_and_encoding_of_text_that_pyarrow_reads_is_read(tmp_path, column, way):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": COLUMNS[column], "score": range(6)}), path, row_group_size=4, **WAYS[way])
    there = [one.encode() if isinstance(one, str) else one for one in pq.read_table(path)["text"].to_pylist()]

    found = records(ParquetConfig(path=path, fields=("score",)))

    assert [one.encode() for one in texts(found)] == [one for one in there if one is not None]
    assert [one.fields["score"] for one in found if hasattr(one, "fields")] == [0, 1, 3, 4, 5]


@pytest.mark.parametrize("kind", ["binary", "binary_view", "large_binary"])
def test_bytes_that_are_no_utf_8_break_their_row_alone(tmp_path, kind):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array([b"ok", b"caf\xe9", b"ok too"], getattr(pa, kind)())}), path)

    found = records(ParquetConfig(path=path))

    assert texts(found) == ["ok", "ok too"]
    assert reasons(found) == ["byte 3 of its text is not utf-8"]


def test_a_table_without_text_names_the_columns_that_have_some(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": [1], "body": ["x"], "tags": [["x"]]}), path)

    assert reasons(records(ParquetConfig(path=path))) == [
        "no column 'text' of text; those of text are: body; set `column`"
    ]


def multipart(kind, *parts):
    lines = [f"Subject: x\nMIME-Version: 1.0\nContent-Type: multipart/{kind}; boundary=b{len(parts)}\n"]
    lines += [f"--b{len(parts)}\n{part}" for part in parts]
    return "\n".join([*lines, f"--b{len(parts)}--\n"])


def part(kind, text, *more):
    return "\n".join([f"Content-Type: {kind}", *more, "", text])


def inner(whole):
    return whole.partition("\n")[2]


BELOW = part("text/plain", "Below.")
PLAIN, PAGE = part("text/plain", "The letter."), part("text/html", "<p>The page of it.</p>")
BLANK = part("text/plain; charset=utf-8", " \u00a0\u200b\n")
PICTURE = part("image/png", "aGk=", "Content-Transfer-Encoding: base64")
FILE = part("text/plain", "An attached file.", "Content-Disposition: attachment; filename=a.txt")
MAIL = {
    "a page alone": (multipart("alternative", PAGE), "The page of it."),
    "both": (multipart("alternative", PLAIN, PAGE), "The letter."),
    "both, the page first": (multipart("alternative", PAGE, PLAIN), "The letter."),
    "a blank one": (multipart("alternative", BLANK, PAGE), "The page of it."),
    "text around a picture": (multipart("mixed", PLAIN, PICTURE, BELOW), "The letter.\n\nBelow."),
    "a blank one first": (multipart("mixed", BLANK, PICTURE, BELOW), "Below."),
    "an attachment": (multipart("mixed", PLAIN, FILE), "The letter."),
    "an attachment beside a blank one": (multipart("mixed", BLANK, FILE), None),
    "alternatives and a footer": (
        multipart("mixed", inner(multipart("alternative", BLANK, PAGE)), PICTURE, part("text/plain", "A footer.")),
        "The page of it.\n\nA footer.",
    ),
    "a page in related": (
        multipart("alternative", BLANK, inner(multipart("related", PAGE, PICTURE, FILE))),
        "The page of it.",
    ),
    "a page beside text": (multipart("mixed", PLAIN, PAGE, PICTURE), "The letter."),
    "two pages": (multipart("mixed", PAGE, PICTURE), "The page of it."),
    "nothing": (multipart("mixed", PICTURE), None),
}


@pytest.mark.parametrize("name", MAIL)
def test_a_message_is_what_its_reader_sees(tmp_path, name):
    content, expected = MAIL[name]
    (tmp_path / "a.eml").write_bytes(content.encode())

    found = records(MailConfig(path=tmp_path, headers=()))

    assert [one.strip() for one in texts(found)] == ([] if expected is None else [expected])
    assert reasons(found) == (["a message without text"] if expected is None else [])


@pytest.mark.parametrize("charset", ["x-unknown", "unknown-8bit", "default", "_iso-2022-jp$ESC"])
def test_a_charset_that_nobody_knows_is_ascii_where_all_is(tmp_path, charset):
    head = f"Subject: x\nContent-Type: text/plain; charset={charset}\n\n".encode()
    (tmp_path / "a.eml").write_bytes(head + b"All ASCII.\n")
    (tmp_path / "b.eml").write_bytes(head + b"caf\xe9")

    found = records(MailConfig(path=tmp_path, headers=()))

    assert [one.strip() for one in texts(found)] == ["All ASCII."]
    assert reasons(found)[0].startswith("unknown encoding")
