"""Parquet, CSV and dialogues: rows and lines as documents, the broken ones counted to the byte."""

import csv
import io
import json
import os
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from source_records import mutants, raw_total, read_mutants, reasons, records, texts

from phalanx.data.sources import BrokenRecord, CsvConfig, DialogueConfig, ParquetConfig, open_source, parquet_decoder
from phalanx.data.sources.reader_process import end_idle_readers
from phalanx.errors import DataError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


HERE = Path(__file__).parent


def parquet(columns, **options):
    stream = io.BytesIO()
    pq.write_table(pa.table(columns), stream, **options)
    return stream.getvalue()


ROWS = {
    "text": ["one", None, "caf\u00e9", "four"],
    "score": [0.5, 1.0, float("nan"), 2.0],
    "link": ["http://e.org/1", None, "http://e.org/3", "http://e.org/4"],
    "tags": [["a"], [], ["b"], []],
}


def test_rows_of_every_row_group_are_documents_with_their_columns(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet(ROWS, row_group_size=2))

    found = records(ParquetConfig(path=path, fields=("score", "tags", "none"), url="link"))

    assert texts(found) == ["one", "caf\u00e9", "four"]
    assert [record.name for record in found] == [f"a.parquet, row {number}" for number in (1, 2, 3, 4)]
    assert raw_total(found) == len("one" + "caf\u00e9" + "four") + 1
    assert (found[0].fields, found[2].fields) == ({"score": 0.5}, {})
    assert found[3].origin.url == "http://e.org/4"
    assert found[1] == BrokenRecord("a.parquet, row 2", 0, "no text in this row", is_unsupported=True)


def test_decimals_and_times_beside_the_text_are_fields_and_cost_no_row(tmp_path):
    path = tmp_path / "a.parquet"
    columns = {
        "text": ["one", "two"],
        "id": pa.array([Decimal(10**17 + 1), None], pa.decimal128(38, 0)),
        "price": pa.array([Decimal("1.25"), Decimal("2.00")], pa.decimal128(10, 2)),
        "at": pa.array([10**18 + 1, None], pa.timestamp("ns", "UTC")),
        "took": pa.array([1, 2], pa.duration("ns")),
        "seen": pa.array([[1], None], pa.list_(pa.timestamp("ns"))),
    }
    path.write_bytes(parquet(columns))

    first, second = records(ParquetConfig(path=path, fields=("id", "price", "took", "seen"), fetched_at="at"))

    assert (first.text, first.fields) == ("one", {"id": 10**17 + 1, "price": 1.25})
    assert (second.text, second.fields) == ("two", {"price": 2})
    assert first.origin.fetched_at == "2001-09-09T01:46:40+00:00"


@pytest.mark.parametrize("kind", [pa.large_string(), pa.binary()])
def test_other_types_of_text_columns_are_read_strictly(tmp_path, kind):
    path = tmp_path / "a.parquet"
    values = [b"good", b"caf\xe9"] if kind == pa.binary() else ["good"]
    path.write_bytes(parquet({"text": pa.array(values, kind)}))

    found = records(ParquetConfig(path=path))

    assert texts(found) == ["good"]
    assert reasons(found) == (["byte 3 of its text is not utf-8"] if kind == pa.binary() else [])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"PAR1 no table PAR1", "is no Parquet file"),
        (b"", "is no Parquet file"),
        (parquet({"body": ["x"], "n": [1]}), "no column 'text' of text; those of text are: body; set `column`"),
        (parquet({"text": [1]}), "column 'text' holds int64, expected text; those of text are: none"),
    ],
)
def test_a_file_without_the_column_is_one_broken_record(tmp_path, content, said):
    path = tmp_path / "a.parquet"
    path.write_bytes(content)

    (record,) = records(ParquetConfig(path=path))

    assert record.reason.startswith(said)
    assert record.raw_bytes == len(content)
    with pytest.raises(DataError, match=r"a\.parquet: "):
        list(open_source(ParquetConfig(path=path)).documents())


def test_a_damaged_row_group_is_counted_packed_and_the_next_one_read(tmp_path):
    path = tmp_path / "a.parquet"
    lines = [f"row {number} " + "x" * 50 for number in range(200)]
    content = bytearray(
        parquet({"text": lines}, row_group_size=100, compression="NONE", use_dictionary=False, write_page_checksum=True)
    )
    at = content.index(b"row 7 ")
    content[at] ^= 1
    path.write_bytes(content)

    found = records(ParquetConfig(path=path))

    assert texts(found) == lines[100:]
    (damage,) = (record for record in found if isinstance(record, BrokenRecord))
    assert damage.name == "a.parquet, row group 1"
    assert damage.reason.startswith("cannot be decoded (")
    assert damage.raw_bytes == pq.ParquetFile(io.BytesIO(content)).metadata.row_group(0).total_byte_size


def test_a_row_group_that_gives_fewer_rows_than_it_says_is_broken(tmp_path):
    path = tmp_path / "a.parquet"
    content = parquet({"text": [f"row {number}" for number in range(40)]}, use_dictionary=False, compression="NONE")
    footer = len(content) - 400
    # zigzag of 40 becomes that of 41 in the counts of rows, which stand in the footer alone
    path.write_bytes(content[:footer] + content[footer:].replace(b"\x16\x50", b"\x16\x52"))

    found = records(ParquetConfig(path=path))

    assert len(texts(found)) == 40
    assert reasons(found) == ["says that it has 41 rows, and gives 40"]


def test_one_text_in_a_million_rows_is_stopped_by_its_ratio(tmp_path):
    path = tmp_path / "a.parquet"
    text = "x" * 100_000
    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), pa.array([text]))
    path.write_bytes(parquet({"text": repeated}, compression="NONE"))

    found = records(ParquetConfig(path=path, max_ratio=2))

    assert reasons(found) == ["its rows are more than 2 times its size"]
    assert raw_total(found) < (16 << 20) + 2 * len(text)


@pytest.fixture
def decoded_by(monkeypatch):
    """Puts another process in the place of the one that decodes."""

    def choose(module):
        end_idle_readers()
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        monkeypatch.setattr(parquet_decoder, "_MODULE", module)

    yield choose
    end_idle_readers()


def test_a_row_group_that_needs_more_memory_than_there_is_is_broken_and_the_next_one_is_read(tmp_path, decoded_by):
    decoded_by("small_decoder")
    path = tmp_path / "a.parquet"
    path.write_bytes(
        parquet({"text": ["a" * (64 << 20), "one two"]}, row_group_size=1, compression="ZSTD", use_dictionary=False)
    )

    large, small = records(ParquetConfig(path=path, max_ratio=1 << 40, max_record_bytes=1 << 30))

    assert (large.name, isinstance(large, BrokenRecord)) == ("a.parquet, row group 1", True)
    assert "cannot be decoded (" in large.reason
    assert small.text == "one two"


def test_a_file_that_ends_its_decoder_is_broken_whole(tmp_path, decoded_by):
    # a module that ends at once, as pyarrow does where it aborts
    decoded_by("phalanx.data.sources.source")
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet(ROWS))

    (damage,) = records(ParquetConfig(path=path))

    assert damage.raw_bytes == path.stat().st_size
    assert "ended the process that reads it" in damage.reason


def test_a_reader_that_stops_in_the_middle_leaves_the_next_one_a_decoder_of_its_own(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet({"text": [f"text {number}" for number in range(5000)]}))
    source = open_source(ParquetConfig(path=path))

    stopped = source.documents()
    first = next(stopped)
    whole = [document.text for document in source.documents()]
    stopped.close()

    assert first.text == "text 0"
    assert whole == [f"text {number}" for number in range(5000)]
    assert [document.text for document in source.documents()] == whole


def test_rows_of_a_table_are_put_into_the_template(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(
        '\ufefftitle,body,score\r\nOne,"first, and\r\nlast",5\r\nTwo,caf\u00e9,x\r\n\r\n'.encode()
        + b"only,two\r\nA,\xe9,1\r\n"
    )

    found = records(CsvConfig(path=path, template="{title}: {body} {{}}", fields=("score", "title")))

    assert texts(found) == ["One: first, and\r\nlast {}", "Two: caf\u00e9 {}"]
    assert [record.fields for record in found[1:3]] == [{"score": 5, "title": "One"}, {"score": "x", "title": "Two"}]
    assert [(record.name, record.reason) for record in found if isinstance(record, BrokenRecord)] == [
        ("a.csv, row 1", "names of the columns"),
        ("a.csv, row 4", "blank line"),
        ("a.csv, row 5", "has 2 cells, expected 3 as in the first row; quote cells that hold a delimiter"),
        ("a.csv, row 6", "byte 2 (0xe9) is not utf-8"),
    ]
    assert raw_total(found) == path.stat().st_size


@given(
    rows=st.lists(st.lists(st.text(alphabet='ab",\n\u00e9', max_size=6), min_size=2, max_size=2), max_size=6),
)
def test_what_a_writer_of_tables_wrote_is_read_and_adds_up(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows") / "a.tsv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, delimiter="\t", lineterminator="\n").writerows([["a", "text"], *rows])

    found = records(CsvConfig(path=path, template="{a}|{text}"))

    assert texts(found) == [f"{a}|{text}" for a, text in rows]
    assert raw_total(found) == path.stat().st_size


def test_an_open_quotation_mark_ends_at_the_largest_record(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'text\n"' + b"x\n" * 100 + b"y\n" * 600)

    found = records(CsvConfig(path=path, max_record_bytes=500))

    assert reasons(found)[1].startswith("is larger than a record may be, 500 bytes")
    assert set(texts(found)) == {"y"}
    assert raw_total(found) == path.stat().st_size


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a,b\n1,2\n", "no column 'text'; its columns are: a, b; set `template`"),
        (b"text;n\nx;2\n", "no column 'text'; its columns are: text;n; set `delimiter`"),
        (b"text,text\n1,2\n", "names a column twice: text, text"),
    ],
)
def test_a_table_with_other_columns_says_so(tmp_path, content, said):
    path = tmp_path / "a.csv"
    path.write_bytes(content)

    assert reasons(records(CsvConfig(path=path)))[0] == said


@pytest.mark.parametrize("template", ["nothing", "{a", "{a!r}", "{a:>10}", "{}"])
def test_a_template_without_plain_columns_is_refused(tmp_path, template):
    with pytest.raises(ValidationError, match="template: "):
        CsvConfig(path=tmp_path, template=template)


SHAPES = {
    "messages": {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": "Hello"},
        ]
    },
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    "alpaca": {"instruction": "Hi", "input": "", "output": "Hello"},
    "prompt": {"prompt": "Hi", "completion": "Hello"},
    "response": {"prompt": "Hi", "response": "Hello"},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_of_a_dialogue_gives_the_same_text(tmp_path, shape):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(SHAPES[shape]) + "\n")

    (found,) = records(DialogueConfig(path=path))

    assert found.text == "user: Hi\n\nassistant: Hello"
    assert found.fields == {"turns": 2, "roles": "user,assistant"}
    assert found.origin.raw_bytes == path.stat().st_size


def test_the_template_of_a_turn_leaves_its_content_alone(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "{role} {content}", "completion": "x"}))

    (found,) = records(DialogueConfig(path=path, turn="<{role}>{content}</{role}>", between=""))

    assert found.text == "<user>{role} {content}</user><assistant>x</assistant>"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"text": "x"}, "is a dialogue of no known shape; its fields are: text; set `shape`"),
        ({"messages": []}, "a dialogue without a turn"),
        ({"messages": "x"}, "field 'messages' holds no list of at most 10000 turns"),
        ({"messages": [{"content": "x"}]}, "turn 1 has no text 'role'"),
        ({"messages": [{"role": "r" * 41, "content": "x"}]}, "turn 1 has no 'role' of 1 to 40 characters"),
        ({"messages": [{"role": "user", "content": [{"image": 1}]}]}, "turn 1 holds something else than text"),
        ({"instruction": "x"}, "field 'output' holds something else than text"),
        ({"prompt": "x"}, "field 'completion' holds something else than text"),
        ([1], "found a JSON list, expected an object"),
    ],
)
def test_a_line_that_is_no_dialogue_says_why(tmp_path, line, said):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(line) + "\n")

    (found,) = records(DialogueConfig(path=path))

    assert found.reason == said
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: "):
        list(open_source(DialogueConfig(path=path)).documents())


def test_a_turn_without_a_place_for_its_content_is_refused(tmp_path):
    with pytest.raises(ValidationError, match=r"turn: lacks \{content\}"):
        DialogueConfig(path=tmp_path, turn="{role}")


SEEDS = {
    "a.parquet": (
        ParquetConfig,
        [
            parquet(ROWS, row_group_size=2),
            parquet({"text": ["one two three"] * 40}, compression="ZSTD"),
            parquet({"text": [f"row {n}" for n in range(40)]}, compression="NONE", write_page_checksum=True),
        ],
    ),
    "a.csv": (CsvConfig, [b'a,text\n1,"two, and\nthree"\n2,four\n\n5,"six ""seven"""\n']),
    "a.jsonl": (DialogueConfig, [json.dumps(one).encode() + b"\n" for one in SHAPES.values()]),
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
    # pyarrow believes the counts in headers of pages; the documentation says so
    assert memory_growth() < 200 << 20
