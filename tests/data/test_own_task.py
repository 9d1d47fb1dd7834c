"""Labelled texts of a user's own: what is read, and what is named by file and line when it is wrong."""

import gzip
import json

import pytest

from phalanx.data.config import LabelledConfig, OwnTaskConfig
from phalanx.data.tasks import Columns, load_own, read_examples
from phalanx.errors import DataError

COLUMNS = Columns("note", "diagnosis", ("flu", "cold", "2"))


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def examples(path):
    return [(one.example.text, one.example.label) for one in read_examples(path, COLUMNS)]


def test_every_format_gives_the_same_rows(tmp_path):
    rows = [{"note": "fever, and\n cough", "diagnosis": "flu", "id": "7"}, {"note": "a sneeze", "diagnosis": " cold "}]
    lines = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    jsonl = write(tmp_path / "a.jsonl", lines)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.encode()))
    table = write(tmp_path / "a.csv", '\ufeffid,diagnosis,note\r\n7,flu,"fever, and\n cough"\r\n8, cold ,a sneeze\r\n')
    tabs = write(tmp_path / "a.tsv", "diagnosis\tnote\nflu\tfever, and cough\ncold\ta sneeze\n")

    expected = [("fever, and cough", 0), ("a sneeze", 1)]
    assert [examples(path) for path in (jsonl, packed, table, tabs)] == [expected] * 4


def test_a_whole_number_may_stand_for_a_class_and_rows_are_not_thrown_away(tmp_path):
    row = json.dumps({"note": "same", "diagnosis": 2})

    assert examples(write(tmp_path / "a.jsonl", f"{row}\n{row}\n")) == [("same", 2)] * 2


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("a.jsonl", '{"note": "x", "diagnosis": "flu"}\n{"note": "x"}\n', ["line 2", "'diagnosis'", "note"]),
        ("a.jsonl", '{"note": "x", "diagnosis": "plague"}\n', ["line 1", "'plague'", "'flu', 'cold', '2'"]),
        ("a.jsonl", '{"note": "x", "diagnosis": true}\n', ["line 1", "'True'"]),
        ("a.jsonl", '{"note": "x", "diagnosis": null}\n', ["line 1", "'None'"]),
        ("a.jsonl", '{"note": " ", "diagnosis": "flu"}\n', ["line 1", "'note' has no text"]),
        ("a.jsonl", '{"note": ["x"], "diagnosis": "flu"}\n', ["line 1", "'note' has no text"]),
        ("a.jsonl", '\n["x"]\n', ["line 2", "JSON list"]),
        ("a.jsonl", '{"note": "x\\ud800", "diagnosis": "flu"}\n', ["line 1", "a lone surrogate"]),
        ("a.jsonl", "{\n", ["line 1", "is not JSON"]),
        ("a.jsonl", '{"note": "x", "note": "y", "diagnosis": "flu"}\n', ["line 1", "a key is there twice"]),
        ("a.jsonl", "\n", ["has no text"]),
        ("a.csv", "note,diagnosis\nx,flu\ny\n", ["line 3", "another number of fields"]),
        ("a.csv", "note,diagnosis\nx,flu,z\n", ["line 2", "another number of fields"]),
        ("a.csv", 'note,diagnosis\n"x"y,flu\n', ["line 2", "is not a row of a table"]),
        ("a.csv", "text,label\nx,flu\n", ["line 2", "'note'", "label, text"]),
        ("a.csv", "note,diagnosis\n", ["has no text"]),
        ("a.csv", "note,diagnosis,note\nx,flu,y\n", ["line 1", "names a column twice"]),
        ("a.txt", "x", [".csv, .tsv, .jsonl"]),
    ],
)
def test_what_is_wrong_is_named_with_its_file_and_line(tmp_path, name, text, named):
    path = write(tmp_path / name, text)

    with pytest.raises(DataError) as refusal:
        read_examples(path, COLUMNS)

    assert [word for word in (str(path), *named) if word not in str(refusal.value)] == []


def test_a_missing_file_and_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"note,diagnosis\n\xff,flu\n")

    with pytest.raises(DataError, match="is not a file"):
        read_examples(tmp_path / "b.csv", COLUMNS)
    with pytest.raises(DataError, match="is not utf-8"):
        read_examples(tmp_path / "a.csv", COLUMNS)


def test_a_held_out_text_that_is_learned_from_is_refused_with_both_places(tmp_path):
    train = write(tmp_path / "train.csv", "note,diagnosis\nx  y,flu\n")
    test = write(tmp_path / "test.csv", "note,diagnosis\nz,flu\nx y,cold\n")

    with pytest.raises(
        DataError, match=r"test\.csv, line 3: this text is also a training text \(.*train\.csv, line 2\)"
    ):
        load_own(train, test, COLUMNS)


def test_one_path_stands_for_a_list_of_one():
    own = OwnTaskConfig.model_validate_json('{"classes": ["a", "b"], "train": "x.csv", "test": ["y.csv"]}')

    assert [str(path) for path in (*own.train, *own.test)] == ["x.csv", "y.csv"]


@pytest.mark.parametrize(
    ("task", "named"),
    [
        ({"classes": ["a"]}, "at least 2"),
        ({"classes": ["a", "a"]}, "twice"),
        ({"classes": ["a", " b"]}, "white space"),
        ({"classes": ["a", "b"], "text": "x", "label": "x"}, "both 'x'"),
        ({"classes": ["a", "b"], "train": ["x", "y"], "test": "z"}, "train names 2 files, test 1"),
        ({"train": "x", "test": "z"}, "classes"),
    ],
)
def test_a_task_that_contradicts_itself_is_refused(task, named):
    with pytest.raises(ValueError, match=named):
        LabelledConfig.model_validate_json(json.dumps({"task": task}))


def test_keys_of_shared_out_tasks_are_refused_beside_own_files_and_not_written():
    own = {"classes": ["a", "b"], "train": "x", "test": "y"}
    with pytest.raises(ValueError, match="alpha, texts_per_client: only for built-in tasks"):
        LabelledConfig.model_validate_json(json.dumps({"task": own, "texts_per_client": 32, "alpha": 0.5}))

    config = LabelledConfig.model_validate_json(json.dumps({"task": own}))
    assert set(config.model_dump()) == {"task"}
    assert LabelledConfig.model_validate_json(config.model_dump_json()) == config
    assert set(LabelledConfig(task="medquad").model_dump()) == {
        "task",
        "home",
        "texts_per_client",
        "test_texts",
        "alpha",
    }
