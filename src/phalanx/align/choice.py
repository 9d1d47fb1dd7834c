"""Pairs that a judge makes of a model's answers, asked in both orders; or that a demonstration makes."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.align.judges import Judge
from phalanx.align.principles import Constitution, Principle
from phalanx.align.prompts import AskedPrompt, prompts_digest
from phalanx.align.revision import check_prompts
from phalanx.align.writer import Writer, drawn_seed
from phalanx.errors import DataError

DEMONSTRATION = "demonstration"
"""The field of a prompt's line that has the answer to learn from."""
TIE = 0.02
"""A judge that is no surer than this, over both orders, has no opinion."""

Verdict = dict[str, Any]
"""Entries about a choice: ``preference`` for the first answer from 0 to 1, and its basis."""
Chooser = Callable[[AskedPrompt, str, str, int], Verdict]
"""From a prompt, two answers and the prompt's number to a verdict."""


def by_principles(judge: Judge, constitution: Constitution, seed: int, *, ranked: bool) -> Chooser:
    """Return the choice by a drawn principle; or, ranked, by the first one in the file under which it is no tie.

    The judge is asked twice, with the answers in both orders, and its preference is the mean: a judge that always says
    A has no opinion.

    Source: Bai et al. 2022, section 4.1; Zheng et al. 2023, section 3.4 (both orders).
    """
    asking = constitution.with_texts("choose")

    def under(principle: Principle, prompt: AskedPrompt, first: str, second: str) -> Verdict:
        sure = [
            judge.first_probability(_fill_comparison(asking.comparison, prompt, principle, *pair))
            for pair in ((first, second), (second, first))
        ]
        return {"principle": principle.name, "preference": (sure[0] + 1 - sure[1]) / 2, "by_order": sure}

    def chosen(prompt: AskedPrompt, first: str, second: str, number: int) -> Verdict:
        asked = asking.principle if ranked else (asking.draw_principle(seed, number),)
        verdict: Verdict = {}
        for principle in asked:
            verdict = under(principle, prompt, first, second)
            if not is_tie(verdict):
                break
        return verdict

    return chosen


def by_worth(worth: Callable[[AskedPrompt, str], float]) -> Chooser:
    """Return the choice of the answer that is worth more; no order can matter."""

    def chosen(prompt: AskedPrompt, first: str, second: str, _number: int) -> Verdict:
        gap = worth(prompt, first) - worth(prompt, second)
        return {"preference": 0.5 if gap == 0 else float(gap > 0), "margin": abs(gap)}

    return chosen


def is_tie(verdict: Verdict) -> bool:
    """Whether a judge has no opinion."""
    return not abs(verdict["preference"] - 0.5) > TIE


class PairChoice:
    """The loop that makes pairs for preference training, or for the reward model of a value.

    Args:
        writer: Answers each prompt twice; once where prompts bring demonstrations.
        choose: Chooses between two answers; None for demonstrations, each of which is better than the model's answer.
        told: Entries of the lineage: principles and judge.
    """

    def __init__(
        self,
        writer: Writer,
        choose: Chooser | None,
        prompts: Sequence[AskedPrompt],
        seed: int,
        origin: Mapping[str, Any],
    ) -> None:
        self._writer, self._choose, self._prompts, self._seed, self._told = writer, choose, prompts, seed, origin
        check_prompts(writer, prompts)
        for prompt in prompts if choose is None else ():
            if not isinstance(prompt.record.get(DEMONSTRATION), str) or not prompt.record[DEMONSTRATION].strip():
                raise DataError(f'{prompt.where}: has no text "{DEMONSTRATION}"; add it, or remove the line')

    @property
    def pair_lineage(self) -> dict[str, Any]:
        """All that decides the rows."""
        return {
            "made_by": "choose",
            "model": self._writer.writer_digest,
            "sampling": self._writer.sampling_settings,
            "prompts": prompts_digest(self._prompts),
            "seed": self._seed,
            **self._told,
        }

    def make_rows(self, numbers: range) -> list[dict[str, Any]]:
        """Make the rows of a batch of prompts: pairs, or why there is none."""
        prompts = [self._prompts[number] for number in numbers]
        chats = [prompt.chat for prompt in prompts]
        written = [
            self._writer.write_answers(chats, drawn_seed(self._seed, side, numbers.start))
            for side in (("first", "second") if self._choose else ("first",))
        ]
        if self._choose is None:
            written.insert(0, [prompt.record[DEMONSTRATION].strip() for prompt in prompts])
        return [
            self._make_row(prompt, first, second, number)
            for prompt, first, second, number in zip(prompts, *written, numbers, strict=True)
        ]

    def _make_row(self, prompt: AskedPrompt, first: str, second: str, number: int) -> dict[str, Any]:
        row: dict[str, Any] = {"prompt": prompt.json_messages}
        if not first or not second:
            return {**row, "left_out": "silent"}
        if first == second:
            return {**row, "left_out": "equal"}
        if self._choose is None:
            return {**row, "chosen": first, "rejected": second}
        verdict = self._choose(prompt, first, second, number)
        if not math.isfinite(verdict["preference"]):
            raise DataError(f"{prompt.where}: the judge's preference is not a finite number; check the judge")
        if is_tie(verdict):
            return {**row, **verdict, "left_out": "tie"}
        better, worse = (first, second) if verdict["preference"] > 0.5 else (second, first)
        return {**row, "chosen": better, "rejected": worse, **verdict}


def chosen_figures(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
    """Return the rows that are pairs, and what became of all; ``order_decided``: the share that said A, or B, twice."""
    decided = [row for row in rows if "left_out" not in row]
    orders = [row["by_order"] for row in rows if "by_order" in row]
    biased = sum((preference > 0.5) == (other > 0.5) for preference, other in orders)
    return decided, {
        "prompts": len(rows),
        "left_out": dict(Counter(row["left_out"] for row in rows if "left_out" in row)),
        "order_decided": biased / len(orders) if orders else None,
        "principles": dict(Counter(row["principle"] for row in decided if "principle" in row)),
    }


def _fill_comparison(template: str, prompt: AskedPrompt, principle: Principle, first: str, second: str) -> str:
    """Fill all placeholders at once, so that an answer that holds a placeholder stays unchanged."""
    parts = {
        "{conversation}": prompt.readable_text,
        "{question}": principle.choose or "",
        "{first}": first,
        "{second}": second,
    }
    pieces, position = [], 0
    while position < len(template):
        name = next((placeholder for placeholder in parts if template.startswith(placeholder, position)), None)
        pieces.append(template[position] if name is None else parts[name])
        position += 1 if name is None else len(name)
    return "".join(pieces)
