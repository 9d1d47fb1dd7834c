"""Outcomes of red-team and safety prompts as training data: mistakes are learned from, what went right is kept."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from phalanx.align.prompts import AskedPrompt, read_records
from phalanx.align.safety import HARMFUL, parse_safety_prompt
from phalanx.errors import DataError

BETTER = "better"
"""The field of an outcome that has the answer that should have been given."""

Shape = Literal["pairs", "conversations"]


def read_outcomes(path: Path) -> list[AskedPrompt]:
    """Read outcomes as `phalanx align safety --out` writes them, or another tool: a prompt, ``harmful``, the answer."""
    outcomes = []
    for place, record in read_records(path):
        outcome = parse_safety_prompt(record, place)
        wrong = next((name for name in ("refused", "violates") if not isinstance(record.get(name), bool)), None)
        if wrong is not None or not isinstance(record.get("answer"), str):
            what, kind = (wrong, "true or false") if wrong else ("answer", "text")
            raise DataError(f'{place}: field "{what}" holds {record.get(what)!r:.40}, expected {kind}')
        outcomes.append(outcome)
    return outcomes


def feedback_rows(
    outcomes: Sequence[AskedPrompt], shape: Shape, refusal: str
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return rows to train on, and how many outcomes became what.

    An outcome is wrong where it violates, or refuses a harmless prompt. From a wrong one the better answer is learned:
    the answer in its line, or `refusal` where a harmful prompt was answered and its line has none; in pairs it is
    preferred to the model's answer. As conversations, right answers are learned unchanged.
    """
    rows, counts = [], Counter[str]()
    for outcome in outcomes:
        answer = str(outcome.record["answer"]).strip()
        became, better = _better_answer(outcome.record, answer, refusal)
        if became == "right" and shape == "pairs":
            counts["right, which no pair is made of"] += 1
            continue
        if better is None or (shape == "pairs" and (not answer or answer == better)):
            counts["without a better answer"] += 1
            continue
        counts[became] += 1
        if shape == "pairs":
            rows.append({"prompt": outcome.json_messages, "chosen": better, "rejected": answer})
        else:
            rows.append({"messages": [*outcome.json_messages, {"role": "assistant", "content": better}]})
    return rows, dict(counts)


def _better_answer(record: Mapping[str, Any], answer: str, refusal: str) -> tuple[str, str | None]:
    """Return what an outcome is, and the answer to learn; None where it is not known."""
    better = record.get(BETTER)
    correction = better.strip() if isinstance(better, str) and better.strip() else None
    if record["violates"]:
        return "violation", correction or (refusal if record[HARMFUL] else None)
    if record["refused"] and not record[HARMFUL]:
        return "over-refusal", correction
    return "right", answer or None
