"""MedQuAD: which kind of question an answer answers; nine NIH sites are natural silos."""

import json
from collections.abc import Iterator
from pathlib import Path

from phalanx.data.sources.files import decode_text, read_lines
from phalanx.data.tasks.task import Example, LabelledExamples, TaskCard, find_file, unique_examples
from phalanx.errors import DataError

FILE = "medquad.jsonl.gz"
_HOW = "it is abachaa/MedQuAD on GitHub, as one JSON object {q, a, qtype, source} a line"
CLASSES = (
    "information",
    "symptoms",
    "treatment",
    "inheritance",
    "frequency",
    "genetic changes",
    "causes",
    "exams and tests",
)
"""The eight kinds with more than 600 answers; the rest is left out."""


def load_medquad(home: Path | None = None) -> LabelledExamples:
    """Read answers without their questions: the wording of a question would give the kind away."""
    path = find_file(home, FILE, _HOW)
    return unique_examples(CLASSES, _read_answers(path), str(path))


def _read_answers(path: Path) -> Iterator[Example]:
    for number, row in enumerate(read_lines(path), start=1):
        place = f"{path}, line {number}"
        try:
            record = json.loads(decode_text(row, place))
            answer, kind, site = str(record["a"]), record["qtype"], str(record["source"])
        except (ValueError, TypeError, KeyError) as exc:
            raise DataError(f"{place}: {type(exc).__name__}: {exc}; expected an object with a, qtype, source") from exc
        if kind in CLASSES and answer.strip():
            yield Example(answer, CLASSES.index(kind), site)


MEDQUAD = TaskCard(
    name="medquad",
    question="which of eight kinds of question an answer answers",
    source="MedQuAD, A. Ben Abacha and D. Demner-Fushman 2019 (github.com/abachaa/MedQuAD), from nine NIH sites",
    licence="CC BY 4.0",
    load=load_medquad,
)
