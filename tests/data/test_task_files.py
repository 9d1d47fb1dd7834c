"""The files of labelled tasks: a sound one is read, and one of another form is refused with its row."""

import gzip
import io
import json
import sys
import zipfile
from types import SimpleNamespace

import pytest

from phalanx.data.tasks import icd10
from phalanx.data.tasks.drug_reviews import load_drug_reviews
from phalanx.data.tasks.icd10 import load_icd10
from phalanx.data.tasks.medical_abstracts import CLASSES, load_medical_abstracts
from phalanx.data.tasks.medical_abstracts import FILE as ABSTRACTS
from phalanx.data.tasks.pubmedqa import FILE as PUBMEDQA
from phalanx.data.tasks.pubmedqa import load_decisions, load_sections
from phalanx.errors import DataError


def examples(labelled) -> list[tuple[str, str]]:
    return [(labelled.classes[example.label], example.text) for example in labelled.examples]


# Medical abstracts


def write_abstracts(home, rows: list[str], header: str = "condition_label,medical_abstract") -> None:
    (home / ABSTRACTS).write_bytes(gzip.compress("\n".join([header, *rows]).encode()))


def test_abstracts_have_the_class_of_their_label_and_doubtful_ones_are_left_out(tmp_path):
    rows = [f'{label},"text {label}, with a comma"' for label in range(1, 6)]
    write_abstracts(tmp_path, [*rows, "1,twice", "2,twice"])

    labelled = load_medical_abstracts(tmp_path)

    assert examples(labelled) == [(name, f"text {label}, with a comma") for label, name in enumerate(CLASSES, 1)]
    assert labelled.contradictory == 1


@pytest.mark.parametrize(
    ("rows", "header", "words"),
    [
        (["one,text"], "condition_label,medical_abstract", "row 1: no condition_label"),
        (["1,a", "2"], "label,medical_abstract", "row 1: no condition_label"),
        (["6,text"], "condition_label,medical_abstract", "an example with label 5"),
        (["1,"], "condition_label,medical_abstract", "0 characters"),
        (["1,text"], "condition_label,medical_abstract", "no example of class"),
    ],
)
def test_abstracts_of_another_form_are_refused(tmp_path, rows, header, words):
    write_abstracts(tmp_path, rows, header)

    with pytest.raises(DataError, match=words):
        load_medical_abstracts(tmp_path)


# PubMedQA


def write_pubmedqa(home, content) -> None:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (home / PUBMEDQA).write_bytes(gzip.compress(data))


ARTICLES = {
    str(number): {
        "final_decision": decision,
        "LONG_ANSWER": f"It is {decision}.",
        "LABELS": ["AIM", "INTRODUCTION", "MATERIALS AND METHODS", "RESULTS", "CONCLUSION"],
        "CONTEXTS": [f"{part} {number}" for part in "abcde"],
    }
    for number, decision in enumerate(("yes", "no", "maybe"))
}


def test_conclusions_come_with_decisions_and_sections_with_roles(tmp_path):
    write_pubmedqa(tmp_path, ARTICLES)

    assert examples(load_decisions(tmp_path)) == [(word, f"It is {word}.") for word in ("yes", "no", "maybe")]
    roles = ("objective", "background", "methods", "results")
    assert examples(load_sections(tmp_path)) == [
        (role, f"{part} {number}") for number in range(3) for role, part in zip(roles, "abcd", strict=True)
    ]


@pytest.mark.parametrize("content", [b"", b"[", b"[" * 100_000, [], {"1": []}])
def test_a_file_that_is_no_object_of_articles_is_refused(tmp_path, content):
    write_pubmedqa(tmp_path, content)

    for load in (load_decisions, load_sections):
        with pytest.raises(DataError, match=PUBMEDQA):
            load(tmp_path)


@pytest.mark.parametrize(
    ("load", "change", "words"),
    [
        (load_decisions, {"final_decision": "perhaps"}, "2: final_decision is 'perhaps'"),
        (load_decisions, {"final_decision": None}, "final_decision is None"),
        (load_sections, {"CONTEXTS": ["a"]}, "as many LABELS as CONTEXTS"),
        (load_sections, {"LABELS": "AIM"}, "as many LABELS as CONTEXTS"),
    ],
)
def test_an_article_of_another_form_is_refused_by_its_number(tmp_path, load, change, words):
    write_pubmedqa(tmp_path, ARTICLES | {"2": ARTICLES["2"] | change})

    with pytest.raises(DataError, match=words):
        load(tmp_path)


def test_a_file_that_is_not_there_is_refused_with_how_to_get_it(tmp_path):
    with pytest.raises(DataError, match="GitHub"):
        load_decisions(tmp_path)


# drug reviews


def write_reviews(home, **tables: str) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in tables.items():
            archive.writestr(name.replace("_", "."), text)
    (home / "drugsCom.zip").write_bytes(buffer.getvalue())


def test_reviews_are_read_from_all_tables_without_the_marks_of_their_page(tmp_path):
    write_reviews(
        tmp_path,
        b_csv='rating,review\npositive,"it helped, at last"\n',
        a_tsv='rating\treview\nnegative\t"It&#039;s bad"\nneutral\tso so\n',
        readme_txt="no table",
    )

    assert examples(load_drug_reviews(tmp_path)) == [
        ("negative", "It's bad"),
        ("neutral", "so so"),
        ("positive", "it helped, at last"),
    ]


@pytest.mark.parametrize("table", ["rating,review\ngood,x\n", "rating,review\npositive,\n", "a,b\n1,2\n"])
def test_a_review_of_another_form_is_refused_with_its_row(tmp_path, table):
    write_reviews(tmp_path, a_csv=table)

    with pytest.raises(DataError, match=r"a\.csv, row 1: expected a review"):
        load_drug_reviews(tmp_path)


def test_an_archive_that_is_none_is_refused(tmp_path):
    (tmp_path / "drugsCom.zip").write_bytes(b"no archive")

    with pytest.raises(DataError, match="cannot be read"):
        load_drug_reviews(tmp_path)


# ICD-10


def icd_package(sizes: list[int]):
    """A package with chapters of so many codes each."""
    codes = [("chapter", str(chapter)) for chapter in range(len(sizes))]
    tree = {
        code: [("leaf", f"{code[1]}.{leaf}") for leaf in range(size)] for code, size in zip(codes, sizes, strict=True)
    }
    return SimpleNamespace(
        get_all_codes=lambda _: [
            code for chapter in codes for code in (chapter, ("block", chapter[1]), *tree[chapter])
        ],
        is_chapter=lambda code: code[0] == "chapter",
        is_leaf=lambda code: code[0] == "leaf",
        get_description=lambda code: f"title of {code[1]}",
    )


def test_chapters_that_are_large_enough_have_as_many_titles_each(monkeypatch):
    monkeypatch.setattr(icd10.importlib, "import_module", lambda name: icd_package([150, 149, 200]))

    labelled = load_icd10()

    assert labelled.classes == ("title of 0", "title of 2")
    counts = [sum(example.label == label for example in labelled.examples) for label in (0, 1)]
    assert counts == [150, 150]
    assert {example.text.split(".")[0] for example in labelled.examples if example.label == 1} == {"title of 2"}


def test_another_package_or_none_is_refused(monkeypatch):
    monkeypatch.setattr(icd10.importlib, "import_module", lambda name: SimpleNamespace())
    with pytest.raises(DataError, match="is not the expected package"):
        load_icd10()
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "simple_icd_10_cm", None)
    monkeypatch.setattr(icd10.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="is not installed"):
        load_icd10()
