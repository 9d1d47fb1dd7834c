"""``phalanx bench alerts``: false alarms of the alert rules on ordinary traffic, and the walks that they find.

An hour of one key is simulated from clean documents: number and form of its requests are in `_ORDINARY` and `_WALKS`
and in the result; the rules have their defaults.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

from phalanx.lab.bench.measure.clean_documents import clean_documents
from phalanx.lab.bench.measure.machine import bench_head, load_average
from phalanx.serve.access import sketch_prompt
from phalanx.serve.observe.config import DriftRule, ExtractionRule
from phalanx.serve.observe.drift import TrafficDrift
from phalanx.serve.observe.walks import PromptWalks

Row = dict[str, Any]
_HOUR_S = 3600
_INSTRUCTION = (
    "You are the assistant of a shop for garden tools. Answer briefly, in the language of the question, "
    "and say where you do not know. Never speak of prices. "
) * 3
Request = tuple[Sequence[str], bool, int]
"""Words of a prompt, whether it asks for log-probabilities, and tokens that are written."""
Kind = Callable[[random.Random, Sequence[Sequence[str]]], Iterator[Request]]


def bench_alerts(quick: bool) -> Row:
    """Count the alarms of the rules for extraction and drift."""
    load = load_average()
    documents = [text.split() for _, text in clean_documents(5_000)]
    num_keys, num_servers = (10, 5) if quick else (100, 100)
    rows = [_walk_row("ordinary", name, kind, num_keys, documents) for name, kind in _ORDINARY.items()]
    rows += [_walk_row("walk", name, kind, num_keys, documents) for name, kind in _WALKS.items()]
    rows.append(_drift_row(num_servers, 2_000 if quick else 10_000))
    return {**bench_head("alerts", load, quick=quick), "rows": rows}


def _walk_row(part: str, name: str, kind: Kind, num_keys: int, documents: Sequence[Sequence[str]]) -> Row:
    rule = ExtractionRule()
    alarms, requests, new = 0, 0, 0
    for seed in range(num_keys):
        draw, walks = random.Random(f"{name} {seed}"), PromptWalks(rule)  # noqa: S311 - traffic that can be drawn again
        sent = list(kind(draw, documents))
        for number, (words, has_logprobs, tokens) in enumerate(sent):
            walks.add_request(
                number * (_HOUR_S - 200) / len(sent),
                "key",
                [sketch_prompt(words)],
                has_logprobs=has_logprobs,
                output_tokens=tokens,
            )
        walk = walks.read_walks(_HOUR_S - 200)["key"]
        alarms, requests, new = alarms + walk.is_extraction(rule), requests + len(sent), new + walk.num_new
    return {
        "part": part,
        "kind": name,
        "keys": num_keys,
        "requests_an_hour": requests / num_keys,
        "new_prompts_an_hour": new / num_keys,
        "alarms": alarms,
    }


def _drift_row(num_servers: int, num_requests: int) -> Row:
    """Requests of one law from the first to the last one: every alarm is false."""
    rule = DriftRule()
    alarms = {"prompts": 0, "completions": 0, "refusals": 0}
    for seed in range(num_servers):
        draw, drift, alarmed = random.Random(f"drift {seed}"), TrafficDrift(rule.num_requests), set[str]()  # noqa: S311 - as above
        for number in range(num_requests):
            lengths = (int(draw.lognormvariate(5, 1)), int(draw.lognormvariate(4.5, 1)))
            drift.add_request(*lengths, is_refused=draw.random() < 0.02)
            if number % 20 == 0:
                prompts, completions, refusals = drift.measure()
                limits = ((prompts, rule.max_shift), (completions, rule.max_shift), (refusals, rule.max_deviations))
                alarmed |= {name for name, (value, limit) in zip(alarms, limits, strict=True) if value > limit}
        for name in alarmed:
            alarms[name] += 1
    counts = {f"alarms_{name}": number for name, number in alarms.items()}
    return {"part": "drift", "kind": "one law", "servers": num_servers, "requests": num_requests, **counts}


def _sentence(draw: random.Random, documents: Sequence[Sequence[str]], length: int) -> Sequence[str]:
    words = draw.choice(documents)
    start = draw.randrange(max(1, len(words) - length))
    return words[start : start + length]


def _chats(number: int, turns: int) -> Kind:
    """Chats one behind the other; each turn sends all earlier ones again."""

    def ask(draw: random.Random, documents: Sequence[Sequence[str]]) -> Iterator[Request]:
        for _ in range(round(number * draw.uniform(0.5, 1.5))):
            words = _INSTRUCTION.split()
            for _ in range(draw.randint(1, 2 * turns - 1)):
                words = [*words, *_sentence(draw, documents, draw.randint(5, 40))]
                yield words, False, draw.randint(50, 250)
                words = [*words, *_sentence(draw, documents, 100)]

    return ask


def _retrieval(draw: random.Random, documents: Sequence[Sequence[str]]) -> Iterator[Request]:
    """Questions with three of two hundred documents before them."""
    shelf = draw.sample(documents, 200)
    for _ in range(round(400 * draw.uniform(0.5, 1.5))):
        passages = [word for words in draw.sample(shelf, 3) for word in words]
        yield [*_INSTRUCTION.split(), *passages, *_sentence(draw, documents, 12)], False, draw.randint(50, 250)


def _labels(draw: random.Random, documents: Sequence[Sequence[str]]) -> Iterator[Request]:
    """Each of a batch of documents gets a short label."""
    for words in draw.sample(documents, round(800 * draw.uniform(0.5, 1.5))):
        yield [*_INSTRUCTION.split(), *words], False, draw.randint(2, 12)


def _completion(draw: random.Random, documents: Sequence[Sequence[str]]) -> Iterator[Request]:
    """Texts that are completed while they are typed."""
    for words in draw.sample(documents, 30):
        for end in range(10, len(words), 5):
            yield words[:end], False, draw.randint(5, 30)


def _evaluation(draw: random.Random, documents: Sequence[Sequence[str]]) -> Iterator[Request]:
    """Scores of answers to a thousand questions; a walk looks the same."""
    for words in draw.sample(documents, 1000):
        yield words, True, 1


def _walk(number: int, *, scores: bool, tokens: int, beginning: int = 0) -> Kind:
    def ask(draw: random.Random, documents: Sequence[Sequence[str]]) -> Iterator[Request]:
        fixed = [f"fixed{place}" for place in range(beginning)]
        for place in count():
            if place == number:
                return
            yield [*fixed, *_sentence(draw, documents, 15), str(place)], scores, tokens

    return ask


_ORDINARY: dict[str, Kind] = {
    "one person's chats": _chats(8, 6),
    "an application of 150 chats an hour": _chats(150, 3),
    "retrieval, 400 questions an hour": _retrieval,
    "labels for 800 documents an hour": _labels,
    "completion while typing": _completion,
    "an application of 600 chats an hour": _chats(600, 3),
    "an evaluation with scores": _evaluation,
}
_WALKS: dict[str, Kind] = {
    "600 prompts with scores": _walk(600, scores=True, tokens=1),
    "1,500 prompts of 300 tokens": _walk(1500, scores=False, tokens=300),
    "the same behind 2,000 fixed words": _walk(1500, scores=False, tokens=300, beginning=2000),
    "250 prompts with scores": _walk(250, scores=True, tokens=1),
}
