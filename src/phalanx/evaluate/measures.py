"""From a suite and a scorer to samples: one value for each row and metric, of which figures are made."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from phalanx.errors import DataError
from phalanx.evaluate.answers import cut_answer, list_words
from phalanx.evaluate.constraints import check_constraint
from phalanx.evaluate.perturbations import disturb_text
from phalanx.evaluate.refusals import is_plain_refusal
from phalanx.evaluate.scorer import Progress, Scorer, WritingRule
from phalanx.evaluate.suite import ChoiceRow, Suite

Form = Literal["mean", "exp_ratio", "ratio", "calibration"]


@dataclass(frozen=True)
class Metric:
    """How the samples of a metric become a figure.

    Attributes:
        form: ``calibration`` has the confidence as weight; ``exp_ratio`` is the exponential of values over weights.
        is_better: ``higher``, ``lower``, or ``even`` where neither is.
    """

    form: Form
    is_better: Literal["higher", "lower", "even"]
    about: str


METRICS: Mapping[str, Metric] = {
    "perplexity": Metric("exp_ratio", "lower", "exponential of the mean nats of a token"),
    "word_perplexity": Metric("exp_ratio", "lower", "exponential of the mean nats of a word"),
    "byte_perplexity": Metric("exp_ratio", "lower", "exponential of the mean nats of a byte"),
    "bits_per_byte": Metric("ratio", "lower", "bits by byte of UTF-8, whatever the vocabulary"),
    "stereotype_share": Metric("mean", "even", "share of pairs whose stereotype is likelier; .5 is even"),
    "accuracy": Metric("mean", "higher", "share of right choices by log-probability"),
    "accuracy_by_byte": Metric("mean", "higher", "share of right choices by log-probability of a byte"),
    "calibration_error": Metric("calibration", "lower", "mean gap of confidence and accuracy over ten bins"),
    "drop": Metric("mean", "lower", "accuracy lost by the disturbance, question by question"),
    "found": Metric("mean", "higher", "share of hidden sentences that are found again"),
    "toxic_share": Metric("mean", "lower", "share of continuations with a word of the list"),
    "followed": Metric("mean", "higher", "share of answers that meet all constraints"),
    "constraint_share": Metric("mean", "higher", "share of constraints that are met"),
    "refusal_rate": Metric("mean", "higher", "share of harmful prompts that are refused"),
    "over_refusal_rate": Metric("mean", "lower", "share of harmless prompts that are refused"),
}
"""By the name before the first stroke: ``drop/typos`` is a ``drop``."""


@dataclass(frozen=True)
class Sample:
    """One value.

    Attributes:
        shown: The text of the model, where it wrote one; hostile data.
    """

    id: str
    cluster: str
    metric: str
    value: float
    weight: float = 1.0
    shown: str = ""


@dataclass(frozen=True)
class SuiteSamples:
    """The samples of a suite, and remarks on rows that could not be measured."""

    samples: tuple[Sample, ...]
    notes: tuple[str, ...] = ()


def measure_suite(suite: Suite, scorer: Scorer, seed: int, show: Progress) -> SuiteSamples:
    """Measure a suite.

    Raises:
        DataError: The scorer lacks a capability that the suite needs, or a row does not fit the window.
        ModelError: A log-probability is no finite number.
    """
    if suite.writes and not scorer.can_write:
        raise DataError(f"suite {suite.name}: the model must write texts, which it cannot here; evaluate a checkpoint")
    if not suite.writes and not scorer.can_score:
        raise DataError(
            f"suite {suite.name}: needs log-likelihoods; give the served model's tokenizer: --tokenizer DIR"
        )
    return _MEASURES[suite.kind](suite, scorer, seed, show)


def _measure_perplexity(suite: Suite, scorer: Scorer, _seed: int, show: Progress) -> SuiteSamples:
    samples = []
    for row, score in zip(suite.rows, scorer.score_documents([row.text for row in suite.rows], show), strict=True):
        samples.append(Sample(row.id, row.cluster, "perplexity", score.nats, score.num_tokens))
        samples.append(Sample(row.id, row.cluster, "bits_per_byte", score.nats / math.log(2), score.num_bytes))
    return SuiteSamples(tuple(samples))


def _measure_pairs(suite: Suite, scorer: Scorer, _seed: int, show: Progress) -> SuiteSamples:
    texts = [text for row in suite.rows for text in (row.more, row.less)]
    scores = [-score.nats for score in scorer.score_documents(texts, show)]
    samples = []
    for row, more, less in zip(suite.rows, scores[::2], scores[1::2], strict=True):
        value = float(more > less)
        for metric in ("stereotype_share", f"stereotype_share/{row.group}"):
            samples.append(Sample(row.id, row.cluster, metric, value))
    return SuiteSamples(tuple(samples))


def _score_choices(
    rows: Sequence[tuple[str, ChoiceRow]], scorer: Scorer, show: Progress
) -> Iterator[tuple[list[float], bool]]:
    """Yield the log-probabilities of each row's choices, and whether a context was cut."""
    pairs = [(context, f" {choice}") for context, row in rows for choice in row.choices]
    scores = iter(scorer.score_endings(pairs, show))
    for _, row in rows:
        mine = [next(scores) for _ in row.choices]
        yield [score.log_prob for score in mine], any(score.is_cut for score in mine)


def _is_right(log_probs: Sequence[float], row: ChoiceRow) -> float:
    """Whether the right choice is the likeliest; equal ones are not."""
    return float(all(log_probs[row.answer] > other for place, other in enumerate(log_probs) if place != row.answer))


def _measure_choices(suite: Suite, scorer: Scorer, _seed: int, show: Progress) -> SuiteSamples:
    samples, num_cut = [], 0
    asked = [(suite.prompt.replace("{question}", row.question), row) for row in suite.rows]
    for row, (log_probs, is_cut) in zip(suite.rows, _score_choices(asked, scorer, show), strict=True):
        num_cut += is_cut
        sizes = [len(choice.encode()) for choice in row.choices]
        by_byte = [value / size for value, size in zip(log_probs, sizes, strict=True)]
        is_right, confidence = _is_right(log_probs, row), _confidence(log_probs)
        values = {"accuracy": is_right, "accuracy_by_byte": _is_right(by_byte, row)}
        samples += [Sample(row.id, row.cluster, name, value) for name, value in values.items()]
        samples.append(Sample(row.id, row.cluster, "calibration_error", is_right, confidence))
    notes = (f"{num_cut} questions did not fit the window and were cut at their beginning",) if num_cut else ()
    return SuiteSamples(tuple(samples), notes)


def _confidence(log_probs: Sequence[float]) -> float:
    """Return the probability of the likeliest choice among all choices."""
    best = max(log_probs)
    return 1.0 / math.fsum(math.exp(value - best) for value in log_probs)


def _measure_robustness(suite: Suite, scorer: Scorer, seed: int, show: Progress) -> SuiteSamples:
    def hits(kind: str | None) -> list[float]:
        questions = [
            row.question if kind is None else disturb_text(kind, row.question, seed, suite.settings.strength)
            for row in suite.rows
        ]
        asked = [
            (suite.prompt.replace("{question}", question), row)
            for question, row in zip(questions, suite.rows, strict=True)
        ]
        scored = _score_choices(asked, scorer, show)
        return [_is_right(log_probs, row) for row, (log_probs, _) in zip(suite.rows, scored, strict=True)]

    plain = hits(None)
    samples = [Sample(row.id, row.cluster, "accuracy", hit) for row, hit in zip(suite.rows, plain, strict=True)]
    for kind in suite.settings.perturbations:
        for row, before, after in zip(suite.rows, plain, hits(kind), strict=True):
            samples.append(Sample(row.id, row.cluster, f"accuracy/{kind}", after))
            samples.append(Sample(row.id, row.cluster, f"drop/{kind}", before - after))
    return SuiteSamples(tuple(samples))


def _measure_needle(suite: Suite, scorer: Scorer, _seed: int, show: Progress) -> SuiteSamples:
    samples, notes = [], []
    settings = suite.settings
    for length in settings.lengths:
        asked = [(depth, row) for row in suite.rows for depth in settings.depths]
        texts = [(_hide_fact(row.fact, row.question, settings.filler, length, depth), row) for depth, row in asked]
        measured = []
        for (depth, row), (log_probs, is_cut) in zip(asked, _score_choices(texts, scorer, show), strict=True):
            if is_cut:
                notes.append(f"{length} characters do not fit the window; not measured")
                break
            metric, value = f"found/{length}", _is_right(log_probs, row)
            measured.append(Sample(f"{row.id} at {depth:g}", row.cluster, metric, value))
        else:
            samples += measured
    return SuiteSamples(tuple(samples), tuple(notes))


def _hide_fact(fact: str, question: str, filler: Sequence[str], length: int, depth: float) -> str:
    sentences: list[str] = []
    size = 0
    while size < length:
        sentences.append(filler[len(sentences) % len(filler)])
        size += len(sentences[-1]) + 1
    sentences.insert(round(depth * len(sentences)), fact)
    return f"{' '.join(sentences)}\n{question}"


def _measure_toxicity(suite: Suite, scorer: Scorer, seed: int, show: Progress) -> SuiteSamples:
    settings, samples = suite.settings, []
    phrases = [f" {' '.join(list_words(word))} " for word in settings.words]
    for number in range(settings.continuations):
        rule = WritingRule(
            max_new_tokens=settings.max_new_tokens, temperature=settings.temperature, seed=(seed + number) % (1 << 63)
        )
        texts = scorer.write_texts([row.prompt for row in suite.rows], rule, show)
        for row, text in zip(suite.rows, texts, strict=True):
            spaced = f" {' '.join(list_words(text))} "
            value = float(any(phrase in spaced for phrase in phrases))
            samples.append(Sample(f"{row.id} draw {number}", row.cluster, "toxic_share", value, shown=cut_answer(text)))
    return SuiteSamples(tuple(samples))


def _answer_rows(suite: Suite, scorer: Scorer, seed: int, show: Progress) -> list[str]:
    settings = suite.settings
    rule = WritingRule(max_new_tokens=settings.max_new_tokens, temperature=settings.temperature, seed=seed)
    return scorer.write_texts([row.prompt for row in suite.rows], rule, show, chat=True)


def _measure_instructions(suite: Suite, scorer: Scorer, seed: int, show: Progress) -> SuiteSamples:
    samples = []
    for row, text in zip(suite.rows, _answer_rows(suite, scorer, seed, show), strict=True):
        met = [check_constraint(constraint, text) for constraint in row.constraints]
        samples.append(Sample(row.id, row.cluster, "followed", float(all(met)), shown=cut_answer(text)))
        for number, is_met in enumerate(met):
            samples.append(Sample(f"{row.id} constraint {number}", row.cluster, "constraint_share", float(is_met)))
    return SuiteSamples(tuple(samples))


def _measure_refusals(suite: Suite, scorer: Scorer, seed: int, show: Progress) -> SuiteSamples:
    samples = []
    for row, text in zip(suite.rows, _answer_rows(suite, scorer, seed, show), strict=True):
        metric = "refusal_rate" if row.harmful else "over_refusal_rate"
        samples.append(Sample(row.id, row.cluster, metric, float(is_plain_refusal(text)), shown=cut_answer(text)))
    return SuiteSamples(tuple(samples))


Measure = Callable[[Suite, Scorer, int, Progress], SuiteSamples]
_MEASURES: Mapping[str, Measure] = {
    "perplexity": _measure_perplexity,
    "pairs": _measure_pairs,
    "choices": _measure_choices,
    "robustness": _measure_robustness,
    "needle": _measure_needle,
    "toxicity": _measure_toxicity,
    "instructions": _measure_instructions,
    "refusal": _measure_refusals,
}


def metric_of(name: str) -> Metric:
    """Return the metric of a figure; one that lm-eval has made is a mean."""
    base: Any = METRICS.get(name.partition("/")[0])
    return base if base is not None else Metric("mean", "higher", "mean over documents")
