"""PubMedQA, labelled part: the answer to an abstract's question, and the role of an abstract's section."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from phalanx.data.sources.files import read_text
from phalanx.data.tasks.task import Example, LabelledExamples, TaskCard, find_file, unique_examples
from phalanx.errors import DataError

FILE = "pubmedqa_l.json.gz"
_HOW = "it is ori_pqal.json of pubmedqa/pubmedqa on GitHub, packed with gzip"
DECISIONS = ("yes", "no", "maybe")
ROLES = ("background", "objective", "methods", "results")
_ROLE_OF: Mapping[str, str] = MappingProxyType(
    {
        "BACKGROUND": "background",
        "INTRODUCTION": "background",
        "OBJECTIVE": "objective",
        "OBJECTIVES": "objective",
        "PURPOSE": "objective",
        "AIM": "objective",
        "METHODS": "methods",
        "METHOD": "methods",
        "MATERIALS AND METHODS": "methods",
        "RESULTS": "results",
    }
)


def load_decisions(home: Path | None = None) -> LabelledExamples:
    """Read each conclusion with the decision that experts drew from it."""
    path = find_file(home, FILE, _HOW)
    return unique_examples(DECISIONS, _read_decisions(path), str(path))


def load_sections(home: Path | None = None) -> LabelledExamples:
    """Read the sections of each abstract that have one of four roles as heading."""
    path = find_file(home, FILE, _HOW)
    return unique_examples(ROLES, _read_sections(path), str(path))


def _read_decisions(path: Path) -> Iterator[Example]:
    for place, record in _read_articles(path):
        decision = record.get("final_decision")
        if decision not in DECISIONS:
            raise DataError(f"{place}: final_decision is {decision!r}; expected one of {', '.join(DECISIONS)}")
        yield Example(str(record.get("LONG_ANSWER", "")), DECISIONS.index(decision))


def _read_sections(path: Path) -> Iterator[Example]:
    for place, record in _read_articles(path):
        headings, texts = record.get("LABELS"), record.get("CONTEXTS")
        if not isinstance(headings, list) or not isinstance(texts, list) or len(headings) != len(texts):
            raise DataError(f"{place}: expected as many LABELS as CONTEXTS; get the file again")
        for heading, text in zip(headings, texts, strict=True):
            role = _ROLE_OF.get(str(heading))
            if role is not None:
                yield Example(str(text), ROLES.index(role))


def _read_articles(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as exc:
        raise DataError(f"{path}: is not JSON ({exc}); {_HOW}") from exc
    if not isinstance(content, dict) or not all(isinstance(record, dict) for record in content.values()):
        raise DataError(f"{path}: expected an object of objects by PubMed number; {_HOW}")
    for number, record in content.items():
        yield f"{path}, {number}", record


PUBMEDQA = TaskCard(
    name="pubmedqa",
    question="whether an abstract's conclusion says yes, no or maybe to its question",
    source="PubMedQA, Q. Jin et al. 2019 (github.com/pubmedqa/pubmedqa)",
    licence="MIT",
    load=load_decisions,
)
PUBMEDQA_SECTIONS = TaskCard(
    name="pubmedqa_sections",
    question="which role a section has in its abstract",
    source=PUBMEDQA.source,
    licence=PUBMEDQA.licence,
    load=load_sections,
)
