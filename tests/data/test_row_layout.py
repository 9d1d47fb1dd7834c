"""Rows are recognised by their columns, and reading conversations as text is told."""

import gzip
import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from phalanx.data.row_layout import chats_read_as_text, layout_of, layout_of_columns, layout_of_file
from phalanx.data.sources import SourceConfig

USER = {"role": "user", "content": "two and two?"}
ASSISTANT = {"role": "assistant", "content": "four"}

CHATS = [
    {"messages": [USER, ASSISTANT]},
    {"text": "user: two and two?", "messages": [USER, ASSISTANT]},
    {"conversations": [{"from": "human", "value": "two and two?"}, {"from": "gpt", "value": "four"}]},
    {"conversations": [USER, ASSISTANT]},
    {"instruction": "add", "input": "2 2", "output": "4", "text": "add 2 2 4"},
    {"prompt": "two and two?", "completion": "four"},
    {"prompt": "two and two?", "response": "four", "id": 7},
    {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}], "tools": []},
]
PREFERENCES = [
    ({"prompt": "two and two?", "chosen": "four", "rejected": "five"}, "pairs"),
    ({"chosen": [USER, ASSISTANT], "rejected": [USER, USER]}, "pairs"),
    ({"prompt": [USER], "chosen": [ASSISTANT], "rejected": [USER], "margin": 1.0}, "pairs"),
    ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}, "hh"),
    ({"prompt": "two and two?", "completion": "four", "label": True}, "labelled"),
]
TEXTS = [
    {"text": "a tale"},
    {"id": 1, "body": "a tale"},
    {"prompt": "a question for a model that writes"},
    {"instruction": "add"},
    {"messages": []},
    {"messages": "none"},
    {"chosen": "a colour"},
    {},
]


@pytest.mark.parametrize("row", CHATS, ids=",".join)
def test_a_conversation_is_seen_by_its_fields(row):
    assert layout_of(row) == "chat"


@pytest.mark.parametrize(("row", "shape"), PREFERENCES, ids=lambda value: value if isinstance(value, str) else None)
def test_preferences_are_seen_with_their_shape(row, shape):
    assert layout_of(row) == shape


@pytest.mark.parametrize("row", TEXTS, ids=",".join)
def test_anything_else_is_text(row):
    assert layout_of(row) is None


@pytest.mark.parametrize(
    ("names", "layout"),
    [
        (["id", "messages"], "chat"),
        (["instruction", "input", "output"], "chat"),
        (["prompt", "completion"], "chat"),
        (["prompt", "response", "score"], "chat"),
        (["prompt", "chosen", "rejected"], "pairs"),
        (["prompt", "completion", "label"], "labelled"),
        (["text", "label"], None),
        (["prompt"], None),
        ([], None),
    ],
)
def test_a_table_is_seen_by_the_names_of_its_columns(names, layout):
    assert layout_of_columns(names) == layout


def written(path, row):
    if path.suffix == ".csv":
        path.write_text("\ufeff" + ",".join(row) + "\n")
    elif path.suffix == ".tsv":
        path.write_text("\t".join(row) + "\n")
    elif path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({name: ["x"] for name in row}), path)
    else:
        # a blank line and a broken one are no reason not to look further
        line = b"\n" + json.dumps(row).encode() + b"\n"
        path.write_bytes(gzip.compress(line) if path.suffix == ".gz" else line)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.tsv", "a.parquet"])
def test_a_file_is_looked_at_whatever_it_is_written_as(tmp_path, name):
    row = {"prompt": "two and two?", "completion": "four"}

    assert layout_of_file(written(tmp_path / name, row)) == "chat"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b"{"),
        ("a.jsonl", b"[1]\n"),
        ("a.jsonl", b""),
        ("a.parquet", b"PAR1"),
        ("a.txt", b"messages"),
        ("a.csv", b"\xff\xfe"),
        ("a.jsonl.gz", b"no gzip"),
    ],
)
def test_what_cannot_be_read_is_left_to_the_source_that_says_why(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)

    assert layout_of_file(tmp_path / name) is None


def source(**keys):
    return TypeAdapter(SourceConfig).validate_json(json.dumps({key: str(value) for key, value in keys.items()}))


@pytest.mark.parametrize("kind", ["jsonl", "dialogue", "text"])
def test_a_conversation_that_is_read_as_text_is_told_with_the_cure(tmp_path, kind):
    path = written(tmp_path / "chats.jsonl", CHATS[0])

    (line,) = chats_read_as_text([source(kind=kind, path=path)], "data.sources")

    assert line.startswith(f"WARNING: data.sources.0: {path} holds conversations and is read as text")
    assert "data.conversations instead of data.sources" in line
    assert "--kind chat" in line


def test_preferences_in_a_folder_are_told_as_well(tmp_path):
    (tmp_path / "rows").mkdir()
    written(tmp_path / "rows" / "a.jsonl", PREFERENCES[0][0])

    (line,) = chats_read_as_text([source(kind="jsonl", path=tmp_path / "rows")], "sources")

    assert "holds preferences" in line
    assert "--kind preferences" in line


def test_text_is_not_warned_of(tmp_path):
    path = written(tmp_path / "a.jsonl", TEXTS[0])
    sources = [source(kind="jsonl", path=path), source(kind="python_manual"), source(kind="text", path=Path("nowhere"))]

    assert chats_read_as_text(sources, "data.sources") == []
