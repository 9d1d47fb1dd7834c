"""The learned scores of texts: errors of the harm score, and models trained on texts of high and low quality scores.

``python -m phalanx.lab.bench.data.text_classifier OUT [--steps 450] [--seeds 3]``, with the data files of the tasks.

**Harm**: trained on four fifths of the first requests in `hh_harmless`, which people wrote to draw harmful answers,
against questions about medicine and encyclopedia paragraphs; measured on the other fifth, and on the 80 prompts of the
suite `safety`, whose harmless half has the words of the harmful one. Beside it the rejected answers against the chosen
ones, and the few words of the rule `bad_words`.

**Quality**: trained on encyclopedia paragraphs against a raw mixture: source code and docstrings of Python, dialogues.
From another mixture of these kinds, with encyclopedia paragraphs in it, the same number of tokens is taken by the
highest scores, at random, and by the lowest; a small GPT-2 is trained on each and asked about encyclopedia text that is
in neither.
"""

import gzip
import json
import random
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from phalanx.data import BpeConfig
from phalanx.data.rules.bad_words import OWN_WORDS
from phalanx.data.rules.text_classifier import (
    ClassifierMeasure,
    TextClassifier,
    is_held_out,
    measure_classifier,
    train_classifier,
)
from phalanx.data.sources import PythonDocstringsConfig, open_source
from phalanx.data.tasks.task import find_file
from phalanx.data.tokenizers.training import train_bpe
from phalanx.evaluate import suites
from phalanx.evaluate.intervals import paired_test
from phalanx.governance.relearning import score_text
from phalanx.lab.bench.measure.clean_documents import paragraphs
from phalanx.lab.bench.measure.harness import print_progress, run_program
from phalanx.redteam.fitting import FittingPlan, fit_rows
from phalanx.security.privacy.leakage import wilson_interval

_WHERE_FROM = "it comes with the data files of the tasks"
_VOCAB_SIZE, _LENGTH, _BATCH, _PART = 1024, 64, 16, 1200
_CLEAN_SHARE, _ASKED = 0.25, 200
_ARMS = ("highest", "random", "lowest")


def measure_harm() -> list[dict[str, Any]]:
    """Return a row for each pair of kinds of texts, and one for the words of `bad_words`."""
    pairs = _read_records("hh_harmless_test.jsonl.gz")
    answers = [
        [pair[kind].rpartition("\n\nAssistant:")[2].strip() for pair in pairs] for kind in ("rejected", "chosen")
    ]
    requests = list(
        dict.fromkeys(pair["chosen"].partition("\n\nAssistant:")[0].partition("Human:")[2].strip() for pair in pairs)
    )
    others = [record["q"] for record in _read_records("medquad.jsonl.gz")[::4]] + paragraphs("wikitext2_valid.txt.gz")
    _, of_answers = train_classifier(*answers)
    classifier, of_requests = train_classifier(requests, others)
    safety = [json.loads(line) for line in (Path(suites.__path__[0]) / "safety.jsonl").read_text().splitlines()]
    prompts = [[row["prompt"] for row in safety if row["harmful"] is kind] for kind in (True, False)]
    held_out = [[text for text in dict.fromkeys(texts) if is_held_out(text)] for texts in (requests, others)]
    return [
        _harm_row("rejected and chosen answers", of_answers),
        _harm_row("requests and other texts", of_requests),
        _harm_row("prompts of the suite safety", measure_classifier(classifier, *prompts)),
        _list_row("requests and other texts", *held_out),
        _list_row("prompts of the suite safety", *prompts),
    ]


def _read_records(name: str) -> list[dict[str, Any]]:
    with gzip.open(find_file(None, name, _WHERE_FROM), "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _harm_row(texts: str, measure: ClassifierMeasure) -> dict[str, Any]:
    middle = next(rate for rate in measure.rates if rate.threshold == 0.5)
    return {
        "part": "harm",
        "method": "classifier",
        "texts": texts,
        "harmful": measure.num_positive,
        "harmless": measure.num_negative,
        "area": measure.area,
        "area_interval": measure.area_interval,
        "missed": middle.missed,
        "missed_interval": middle.missed_interval,
        "false_alarms": middle.false_alarms,
        "false_alarms_interval": middle.false_alarms_interval,
    }


def _list_row(texts: str, harmful: Sequence[str], harmless: Sequence[str]) -> dict[str, Any]:
    missed, alarms = (
        sum(is_counted(any(word in text.lower().split() for word in OWN_WORDS)) for text in group)
        for group, is_counted in ((harmful, lambda hit: not hit), (harmless, bool))
    )
    return {
        "part": "harm",
        "method": "word list",
        "texts": texts,
        "harmful": len(harmful),
        "harmless": len(harmless),
        "area": None,
        "area_interval": None,
        "missed": missed / len(harmful),
        "missed_interval": wilson_interval(missed, len(harmful)),
        "false_alarms": alarms / len(harmless),
        "false_alarms_interval": wilson_interval(alarms, len(harmless)),
    }


def measure_quality(steps: int, seeds: int) -> list[dict[str, Any]]:
    """Return a row with the errors of the score, one for each arm and seed, and one a seed for the differences."""
    clean = paragraphs("wikitext2_valid.txt.gz")
    half = len(clean) // 2
    noise = _read_noise(round(half * (1 / _CLEAN_SHARE - 1)) * 2)
    raw, noise = noise[::2], noise[1::2]
    classifier, measure = train_classifier(clean[:half], raw)
    pool = [*clean[half:], *noise]
    tokenizer = train_bpe(iter(pool), BpeConfig(vocab_size=_VOCAB_SIZE))
    encoded = [tuple([*ids, tokenizer.eos_id]) for ids in tokenizer.encode_texts(pool)]
    asked = [tuple(ids) for ids in tokenizer.encode_texts(paragraphs("wikitext2_test.txt.gz")[:_ASKED])]
    budget = sum(map(len, encoded[: len(clean) - half]))
    rows: list[dict[str, Any]] = [
        {
            "part": "quality score",
            "positive": measure.num_positive,
            "negative": measure.num_negative,
            "area": measure.area,
            "area_interval": measure.area_interval,
            "rates": [[rate.threshold, rate.missed, rate.false_alarms] for rate in measure.rates],
        }
    ]
    for seed in range(seeds):
        losses = {}
        for arm in _ARMS:
            order = _order_of(arm, pool, classifier, seed)
            chosen = _take_tokens([encoded[number] for number in order], budget)
            is_clean = [number < len(clean) - half for number in order[: len(chosen)]]
            model = _train_model([token for text in chosen for token in text], tokenizer.vocab_size, steps, seed)
            losses[arm] = [score_text(model, text, _LENGTH).loss for text in asked]
            row = {"part": "ablation", "seed": seed, "arm": arm, "documents": len(chosen), "tokens": budget}
            rows.append(row | {"clean_share": sum(is_clean) / len(is_clean), "loss": _mean(losses[arm])})
            print_progress(str(rows[-1]), "text-classifier")
        names = [str(number) for number in range(len(asked))]
        rows += [
            {
                "part": "difference",
                "seed": seed,
                "arm": arm,
                **paired_test(losses["random"], losses[arm], names, 0).to_json(),
            }
            for arm in ("highest", "lowest")
        ]
    return rows


def _read_noise(count: int) -> list[str]:
    """Return at most so many texts of three kinds: source code, docstrings, dialogues, each cut to a paragraph."""
    library = Path(sysconfig.get_path("stdlib"))
    code = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(library.glob("*.py"))]
    docstrings = [document.text for document in open_source(PythonDocstringsConfig()).documents()]
    dialogues = [pair["chosen"] for pair in _read_records("hh_harmless_test.jsonl.gz")]
    kinds = [[part for text in texts for part in _cut_text(text)] for texts in (code, docstrings, dialogues)]
    # as many of each as there are of the rarest
    share = min(count // 3, *map(len, kinds))
    drawn = [random.Random(0).sample(parts, share) for parts in kinds]  # noqa: S311
    return [part for group in zip(*drawn, strict=True) for part in group]


def _cut_text(text: str) -> list[str]:
    return [text[start : start + _PART] for start in range(0, len(text), _PART) if len(text) - start > _PART // 2]


def _order_of(arm: str, pool: Sequence[str], classifier: TextClassifier, seed: int) -> list[int]:
    """Return the numbers of all texts in the order in which an arm takes them."""
    numbers = list(range(len(pool)))
    random.Random(seed).shuffle(numbers)  # noqa: S311
    if arm == "random":
        return numbers
    scores = [classifier.score_text(text) for text in pool]
    key: Callable[[int], float] = scores.__getitem__
    return sorted(numbers, key=key, reverse=arm == "highest")


def _take_tokens(texts: Sequence[tuple[int, ...]], budget: int) -> list[tuple[int, ...]]:
    """Return texts from the front with exactly so many tokens; the last one is cut."""
    taken: list[tuple[int, ...]] = []
    for text in texts:
        if budget <= 0:
            break
        taken.append(text[:budget])
        budget -= len(text)
    return taken


def _train_model(tokens: Sequence[int], vocab_size: int, steps: int, seed: int) -> Any:
    torch.manual_seed(seed)
    sizes: dict[str, float] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, n_positions=_LENGTH, **sizes))
    rows = [tokens[start : start + _LENGTH] for start in range(0, len(tokens) - _LENGTH, _LENGTH)]
    fit_rows(model, rows, FittingPlan(steps=steps, batch=_BATCH, seed=seed))
    return model


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def measure_scores(steps: int = 450, seeds: int = 3) -> dict[str, Any]:
    """Measure both."""
    return {"rows": [*measure_harm(), *measure_quality(steps, seeds)]}


if __name__ == "__main__":
    run_program("text-classifier", measure_scores)
