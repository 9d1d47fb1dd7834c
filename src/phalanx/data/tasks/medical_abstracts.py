"""Medical abstracts: the class of condition that an abstract is about."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from phalanx.data.sources.files import read_text
from phalanx.data.tasks.task import Example, LabelledExamples, TaskCard, find_file, unique_examples
from phalanx.errors import DataError

FILE = "medical_abstracts.csv.gz"
_HOW = "it is medical_tc_test.csv of sebischair/Medical-Abstracts-TC-Corpus on GitHub, packed with gzip"
CLASSES = (
    "neoplasms",
    "digestive system diseases",
    "nervous system diseases",
    "cardiovascular diseases",
    "general pathological conditions",
)
"""In the order of the labels 1 to 5."""


def load_medical_abstracts(home: Path | None = None) -> LabelledExamples:
    """Read the abstracts; some are in the file twice, with two labels, and are left out."""
    path = find_file(home, FILE, _HOW)
    return unique_examples(CLASSES, _read_abstracts(path), str(path))


def _read_abstracts(path: Path) -> Iterator[Example]:
    rows = csv.DictReader(io.StringIO(read_text(path), newline=""))
    for number, row in enumerate(rows, start=1):
        try:
            label, text = int(row["condition_label"]) - 1, row["medical_abstract"]
        except (KeyError, TypeError, ValueError) as exc:
            raise DataError(f"{path}, row {number}: no condition_label, medical_abstract in it; {_HOW}") from exc
        yield Example(text or "", label)


MEDICAL_ABSTRACTS = TaskCard(
    name="medical_abstracts",
    question="which of five classes of condition an abstract is about",
    source="Medical Abstracts TC Corpus, T. Schopf et al. 2022 (github.com/sebischair/Medical-Abstracts-TC-Corpus)",
    licence="CC BY-SA 3.0",
    load=load_medical_abstracts,
)
