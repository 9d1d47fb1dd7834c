"""A document with an item of an evaluation set in it is named with set and item."""

import gzip
import json
import unicodedata

import pytest
from made_pages import HONEST, page_of
from pydantic import ValidationError

from phalanx.data.rules import (
    DecontaminationConfig,
    Drop,
    EvaluationSetConfig,
    Quarantine,
    RuleReason,
    Tag,
    make_rule,
)
from phalanx.errors import DataError

ITEM = "Which of these four planets has the largest number of moons that have been named so far"
SHORT = "What is the capital of the largest country"


@pytest.fixture
def planets(tmp_path):
    path = tmp_path / "planets.jsonl"
    rows = [
        {"question": "Too short", "answer": "x"},
        {"question": ITEM, "answer": "Saturn"},
        {"question": SHORT, "answer": "y"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return EvaluationSetConfig(name="planets", path=path, fields=("question", "answer"))


def judge(text, *sets, **settings):
    return make_rule(DecontaminationConfig(sets=sets, **settings)).judge_page(page_of(text))


@pytest.mark.parametrize(
    "text", ["", HONEST, "too short", " ".join(ITEM.split()[:12]), " ".join(reversed(ITEM.split()))]
)
def test_a_document_without_an_item_passes(planets, text):
    assert judge(text, planets) is None


@pytest.mark.parametrize(
    ("text", "item"),
    [
        (f"{HONEST} {ITEM}? {HONEST}", 2),
        (ITEM.upper().replace(" ", ",\n"), 2),
        (" ".join(ITEM.split()[3:16]), 2),
        (f"Question: {SHORT}?", 3),
    ],
)
def test_an_item_is_found_without_case_and_punctuation(planets, text, item):
    assert judge(text, planets) == Drop(RuleReason("words_of", f"planets item {item}", 13))


def test_the_recipe_says_what_becomes_of_it(planets):
    assert judge(ITEM, planets, action="tag") == Tag({"contaminated_by": "planets item 2"})
    assert judge(ITEM, planets, action="quarantine") == Quarantine(RuleReason("words_of", "planets item 2", 13))


def test_the_border_of_words_counts_itself(planets):
    thirteen = " ".join(ITEM.split()[:13])

    assert judge(thirteen, planets) is not None
    assert judge(thirteen, planets, words=14) is None


def test_of_several_sets_the_first_is_told(planets, tmp_path):
    lines, table = tmp_path / "lines.txt.gz", tmp_path / "table.csv"
    lines.write_bytes(gzip.compress(f"nothing\n{ITEM}\n".encode()))
    table.write_text(f'id,text\n1,"{SHORT}, or so it is said"\n')
    sets = (
        EvaluationSetConfig(name="lines", path=lines),
        planets,
        EvaluationSetConfig(name="table", path=table, fields=("text",)),
    )

    assert judge(ITEM, *sets).reason.value == "lines item 2"
    assert judge(f"{SHORT} or so it is said", *sets).reason.value == "planets item 3"
    assert judge("country or so it is said", *sets) is None


@pytest.mark.parametrize(
    ("name", "text"), [("A.JSON.GZ", json.dumps({"id": "1", "text": ITEM})), ("a.tsv", f"id\ttext\n1\t{ITEM}\n")]
)
def test_the_end_of_a_files_name_says_how_it_is_read(tmp_path, name, text):
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("GZ") else text.encode())
    table = EvaluationSetConfig(name="table", path=tmp_path / name, fields=("text",))

    assert judge(f"Of moons: {ITEM}", table) == Drop(RuleReason("words_of", "table item 1", 13))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", "\ufeff" + json.dumps({"id": "1", "text": ITEM}) + "\r\n\r\n"),
        ("a.csv", f'\ufeffid,text\r\n1,"{ITEM}"\r\n'),
        ("a.csv", f'\ufefftext,id\r\n"{ITEM}",1\r\n'),
        ("a.txt", f"\ufeff{ITEM}\r\n\r\n"),
    ],
)
def test_a_set_is_read_as_windows_writes_it(tmp_path, name, text):
    (tmp_path / name).write_bytes(text.encode())
    written = EvaluationSetConfig(name="written", path=tmp_path / name, fields=() if name == "a.txt" else ("text",))

    assert judge(ITEM, written) == Drop(RuleReason("words_of", "written item 1", 13))


@pytest.mark.parametrize(("of_set", "of_page"), [("NFD", "NFC"), ("NFC", "NFD")])
def test_an_item_is_found_in_either_normal_form(tmp_path, of_set, of_page):
    item = "Où l'été dernier étaient les élèves du lycée français près de la forêt de Fontainebleau"
    (tmp_path / "a.txt").write_text(unicodedata.normalize(of_set, item), encoding="utf-8")

    found = judge(unicodedata.normalize(of_page, item), EvaluationSetConfig(name="set", path=tmp_path / "a.txt"))

    assert found == Drop(RuleReason("words_of", "set item 1", 13))


@pytest.mark.parametrize(
    ("name", "content", "fields", "error"),
    [
        ("a.jsonl", b'{"question": 5}\n', ("question",), "item 1 of .* has no text in every field of question"),
        ("a.jsonl", b"[" * 100_000 + b"\n", ("question",), "item 1 of .* has no text"),
        ("a.jsonl", b'{"question": "x"}\n', (), "has columns; list the columns with text in fields"),
        ("a.txt", b"\xff\xfe\n", (), "cannot be read"),
        ("a.txt", b"x" * 1_100_000, (), "line 1 of .* has more than 1048576 characters"),
        ("a.txt", b"too short\n", (), "no item of .* has 8 words"),
        ("a.txt.gz", b"no gzip", (), "cannot be read"),
        ("a.txt.gz", gzip.compress(b"x" * 1000)[:-12], (), "cannot be read"),
        ("a.csv", b"text\n" + b"x" * 1_100_000 + b"\n", ("text",), "line 2 of .* has more than 1048576 characters"),
        (
            "a.csv",
            b'text\n"' + b"xxxxxxxx\n" * 130_000 + b'"\n',
            ("text",),
            "cannot be read|item 1 of .* has more than",
        ),
        ("a.csv", b"id\n5\n", ("text",), "item 1 of .* has no text in every field of text"),
        ("a.JSONL", b'{"question": "x"}\n', (), "has columns; list the columns with text in fields"),
        ("a.json", b'[{"question": "x"}]\n', ("question",), "item 1 of .* has no text in every field of question"),
        ("a.jsonlines", b'{"question": "x"}\n', ("question",), "is read as plain lines, which have no fields"),
        ("missing.txt", None, (), "cannot be read"),
    ],
)
def test_a_set_that_cannot_be_read_is_an_error_that_names_it(tmp_path, name, content, fields, error):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    config = EvaluationSetConfig(name="planets", path=tmp_path / name, fields=fields)

    with pytest.raises(DataError, match=f"'planets'.*{error}"):
        make_rule(DecontaminationConfig(sets=(config,)))


@pytest.mark.parametrize(
    ("settings", "error"),
    [({"words": 7}, "min_words=8 is above words=7"), ({"words": 65}, "words"), ({"sets": ()}, "sets")],
)
def test_settings_that_find_nothing_are_refused(planets, settings, error):
    with pytest.raises(ValidationError, match=error):
        DecontaminationConfig(**{"sets": (planets,), **settings})


def test_two_sets_with_one_name_are_refused(planets):
    with pytest.raises(ValidationError, match="two evaluation sets have the same name"):
        DecontaminationConfig(sets=(planets, planets))
