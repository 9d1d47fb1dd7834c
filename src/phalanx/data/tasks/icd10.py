"""ICD-10-CM: the title of a code, to its chapter. From the package simple-icd-10-cm."""

import importlib
import importlib.util
from pathlib import Path

from phalanx.data.tasks.split import balance_classes
from phalanx.data.tasks.task import Example, LabelledExamples, TaskCard, unique_examples
from phalanx.errors import DataError

_DISTRIBUTION = "simple-icd-10-cm"
_MODULE = "simple_icd_10_cm"
_PER_CHAPTER = 150
_SEED = 0


def load_icd10(home: Path | None = None) -> LabelledExamples:
    """Read at most 150 titles of every chapter that has as many; near ones may lie on both sides of a split."""
    del home
    if importlib.util.find_spec(_MODULE) is None:
        raise DataError(f"{_DISTRIBUTION}: is not installed; run pip install phalanx-train[tasks]")
    icd = importlib.import_module(_MODULE)
    chapters: list[str] = []
    examples: list[Example] = []
    try:
        # the list goes through the tree from the top: a chapter stands before all that is in it
        for code in icd.get_all_codes(True):
            if icd.is_chapter(code):
                chapters.append(str(icd.get_description(code)))
            elif icd.is_leaf(code):
                examples.append(Example(str(icd.get_description(code)), len(chapters) - 1))
    except (AttributeError, TypeError, ValueError) as exc:
        raise DataError(f"{_DISTRIBUTION}: is not the expected package ({exc}); install version 1.5.0") from exc
    large = [
        label for label in range(len(chapters)) if sum(example.label == label for example in examples) >= _PER_CHAPTER
    ]
    new = {old: label for label, old in enumerate(large)}
    examples_kept = [Example(example.text, new[example.label]) for example in examples if example.label in new]
    chosen = unique_examples([chapters[label] for label in large], examples_kept, _DISTRIBUTION)
    return LabelledExamples(chosen.classes, balance_classes(chosen.examples, _PER_CHAPTER, _SEED), chosen.contradictory)


ICD10 = TaskCard(
    name="icd10",
    question="to which chapter of ICD-10-CM a code's title belongs",
    source="ICD-10-CM, US CDC/NCHS, in the Python package simple-icd-10-cm (S. Travasci)",
    licence="codes: US government, public domain; package: MIT",
    load=load_icd10,
)
