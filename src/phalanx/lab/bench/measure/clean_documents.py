"""Clean text for detectors and filters: documents that nobody marked and nobody attacked with."""

import gzip
import json

from phalanx.data.tasks.task import find_file

_WHERE_FROM = "it comes with the data files of the tasks"


def clean_documents(count: int) -> list[tuple[str, str]]:
    """Return kind and text of documents: encyclopedia paragraphs, then answers about medicine."""
    documents = [("wikitext2", paragraph) for paragraph in paragraphs("wikitext2_test.txt.gz")]
    with gzip.open(find_file(None, "medquad.jsonl.gz", _WHERE_FROM), "rt", encoding="utf-8") as file:
        answers = (json.loads(row)["a"] for row in file)
        documents += [("medquad", answer) for answer in answers if len(answer) > 200]
    return list(dict.fromkeys(documents))[:count]


def paragraphs(name: str) -> list[str]:
    """Return the paragraphs of a data file of encyclopedia articles."""
    with gzip.open(find_file(None, name, _WHERE_FROM), "rt", encoding="utf-8") as file:
        return [row.strip() for row in file if len(row) > 400]
