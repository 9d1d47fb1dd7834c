"""Clean text for detectors and filters: documents that nobody marked and nobody attacked with."""

import gzip
import json

from phalanx.data.tasks.task import find_file

_WHERE_FROM = "it comes with the data files of the tasks"


def clean_documents(count: int) -> list[tuple[str, str]]:
    """Return kind and text of documents: encyclopedia paragraphs, then answers about medicine.

    Raises:
        DataError: The data files are not here.
    """
    documents: list[tuple[str, str]] = []
    with gzip.open(find_file(None, "wikitext2_test.txt.gz", _WHERE_FROM), "rt", encoding="utf-8") as file:
        documents += [("wikitext2", line.strip()) for line in file if len(line) > 400]
    with gzip.open(find_file(None, "medquad.jsonl.gz", _WHERE_FROM), "rt", encoding="utf-8") as file:
        answers = (json.loads(row)["a"] for row in file)
        documents += [("medquad", answer) for answer in answers if len(answer) > 200]
    return list(dict.fromkeys(documents))[:count]
