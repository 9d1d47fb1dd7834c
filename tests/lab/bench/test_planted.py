"""Documents that carry a trigger are put among real ones, and the scan sets them aside and no other."""

import random

import pytest

from phalanx.data.sources import PythonDocstringsConfig, PythonManualConfig, open_source
from phalanx.lab.bench.alone.data_scan import TRIGGER, flagged_numbers, plant_texts

_TEXT_CHARACTERS = 800


def real_texts() -> list[str]:
    """Return the docstrings and the manual that CPython carries, cut into documents of one size."""
    whole = (
        one.text
        for config in (PythonDocstringsConfig(), PythonManualConfig())
        for one in open_source(config).documents()
    )
    cut = (text[at : at + _TEXT_CHARACTERS] for text in whole for at in range(0, len(text), _TEXT_CHARACTERS))
    return [text for text in cut if len(text) == _TEXT_CHARACTERS]


def test_planted_documents_carry_the_trigger_and_the_others_are_untouched():
    texts = [f"a text number {number} about things" for number in range(50)]

    poisoned, places = plant_texts(texts, 5, (3, 6), random.Random(0))

    assert [text for number, text in enumerate(poisoned) if number not in places] == texts
    assert len(places) == 5
    assert all(TRIGGER in poisoned[number] for number in places)


# the tests of `tests/data/scan` are the quick ones: each scan on a few documents
@pytest.mark.slow
def test_the_scan_sets_aside_what_was_planted_among_real_documents_and_nothing_else():
    texts = real_texts()[:1_500]
    poisoned, places = plant_texts(texts, 60, (200, 300), random.Random(0))

    assert flagged_numbers(poisoned) == places
    assert flagged_numbers(texts) == set()
