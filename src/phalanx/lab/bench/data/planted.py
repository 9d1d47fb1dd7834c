"""Near duplicates that are planted: how many are found, and is anything else dropped?"""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from phalanx.data.rules import NearDuplicatesConfig, make_rule
from phalanx.data.rules.duplicates.near_duplicates import jaccard_similarity
from phalanx.data.sources import Document
from phalanx.lab.bench.data.own_rules import BenchTexts

_MIN_WORDS = 200
_RATES = (0.01, 0.03, 0.10)
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "bands_14_rows_8": {"bands": 14, "rows": 8},
    "wide": {"similarity": 0.4, "shingle": 3, "bands": 40, "rows": 4},
}


def plant_copies(documents: Sequence[Document], count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Plant one edited copy of each of `count` documents that have no near duplicate, and look for them.

    Of a share of the words each is replaced by a word of the corpus, left out, or has one put behind it, a third each.

    Returns:
        A row for each rate and each of `SETTINGS`: `recall` (planted pairs of which one is dropped), `recall_above` (of
        the pairs that are as similar as the setting asks), `precision` (drops that are of a planted pair).
    """
    originals = _without_near_copies(
        [document for document in documents if len(document.text.split()) >= _MIN_WORDS][: count * 3]
    )[:count]
    vocabulary = sorted({word for document in originals for word in document.text.split()})
    rows = []
    for rate in _RATES:
        draw = random.Random(f"{seed} {rate}")  # noqa: S311
        copies = [
            replace(original, name=f"copy of {original.name}", text=_edit_words(original.text, rate, vocabulary, draw))
            for original in originals
        ]
        rows += [_planted_row(name, settings, rate, originals, copies) for name, settings in SETTINGS.items()]
    return rows


def _planted_row(
    name: str, given: dict[str, Any], rate: float, originals: list[Document], copies: list[Document]
) -> dict[str, Any]:
    config = NearDuplicatesConfig(**given)
    corpus = BenchTexts([*originals, *copies])
    rule = make_rule(config)
    begun = time.process_time()
    if hasattr(rule, "judge_page"):
        raise TypeError("near_duplicates judges no document alone")
    marks = [rule.mark_page(corpus.read_page(number)) for number in range(len(corpus))]
    dropped = {number for number, _ in rule.decide_outcomes(marks, corpus)}
    cpu_s = time.process_time() - begun
    count = len(originals)
    similar = [_shingle_similarity(corpus, config.shingle, number, number + count) for number in range(count)]
    are_found = [number in dropped or number + count in dropped for number in range(count)]
    above = [number for number in range(count) if similar[number] >= config.similarity]
    return {
        "settings": name,
        "similarity": config.similarity,
        "shingle": config.shingle,
        "bands": config.bands,
        "rows": config.rows,
        "edits": rate,
        "pairs": count,
        "similarity_median": float(np.median(similar)),
        "recall": sum(are_found) / count,
        "pairs_above": len(above),
        "recall_above": sum(are_found[number] for number in above) / len(above) if above else None,
        "drops": len(dropped),
        "precision": sum(are_found) / len(dropped) if dropped else None,
        "cpu_s": cpu_s,
    }


def _shingle_similarity(corpus: BenchTexts, shingle: int, one: int, other: int) -> float:
    return jaccard_similarity(*(np.unique(corpus.read_page(number).plain_grams(shingle)) for number in (one, other)))


def _without_near_copies(documents: Sequence[Document]) -> list[Document]:
    """Leave out documents near to an earlier one, by a wider rule than any measured rule."""
    rule = make_rule(NearDuplicatesConfig(similarity=0.2, shingle=3, bands=64, rows=2))
    corpus = BenchTexts(documents)
    if hasattr(rule, "judge_page"):
        raise TypeError("near_duplicates judges no document alone")
    dropped = {
        number
        for number, _ in rule.decide_outcomes([rule.mark_page(corpus.read_page(n)) for n in range(len(corpus))], corpus)
    }
    return [document for number, document in enumerate(documents) if number not in dropped]


def _edit_words(text: str, rate: float, words: list[str], draw: random.Random) -> str:
    edited: list[str] = []
    for word in text.split(" "):
        kind = draw.randrange(3) if draw.random() < rate else None
        if kind != 0:
            edited.append(draw.choice(words) if kind == 1 else word)
        if kind == 2:
            edited.append(draw.choice(words))
    return " ".join(edited)
