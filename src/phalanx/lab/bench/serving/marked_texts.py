"""Texts by a real model, with and without a mark: their quality, and the mark after edits."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import torch

from phalanx.serve.marks import MarkKey, TextDraw, detect_mark, draw_next
from phalanx.serve.sampling import SamplingRule

Row = dict[str, Any]
Edit = Callable[[list[str], random.Random], list[str]]


@dataclass(frozen=True)
class WrittenText:
    """One text.

    Attributes:
        nats: Mean of the model's own surprise a token, at temperature 1.
    """

    tokens: list[int]
    text: str
    nats: float


class BatchWriter:
    """Writes batches of texts of one length with transformers' model and our draw."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self._tokenizer = model, tokenizer
        self._ends = sorted({model.generation_config.eos_token_id} | set(tokenizer.all_special_ids))

    def tokenize(self, text: str) -> list[int]:
        """Return a text's tokens as a detector reads them."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def write(self, prompts: Sequence[Sequence[int]], draws: Sequence[TextDraw], length: int) -> list[WrittenText]:
        """Write one text behind each prompt; prompts have one length, and no text ends early."""
        written: list[list[int]] = [[] for _ in prompts]
        nats = torch.zeros(len(prompts), dtype=torch.float64)
        inputs, cache = torch.tensor([list(prompt) for prompt in prompts]), None
        with torch.no_grad():
            for _ in range(length):
                outputs = self.model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache, logits = outputs.past_key_values, outputs.logits[:, -1].float()
                allowed = torch.ones_like(logits, dtype=torch.bool)
                allowed[:, self._ends] = False
                tokens, _ = draw_next(draws, logits, allowed)
                surprise = logits.masked_fill(~allowed, -torch.inf).double().log_softmax(-1)
                nats -= surprise.gather(1, tokens[:, None])[:, 0]
                for text, token in zip(written, tokens.tolist(), strict=True):
                    text.append(token)
                inputs = tokens[:, None]
        texts = self._tokenizer.batch_decode(written)
        return [
            WrittenText(tokens, text, float(sum_) / length)
            for tokens, text, sum_ in zip(written, texts, nats.tolist(), strict=True)
        ]


@dataclass(frozen=True)
class WritingArm:
    """One way of writing.

    Attributes:
        bias: Largest bias of greedy text, in nats; 0 draws.
    """

    name: str
    temperature: float
    is_marked: bool
    bias: float = 0.0

    def make_draws(self, key: MarkKey, count: int) -> list[TextDraw]:
        """Return the draw of each of some texts; two arms of one temperature have the same seeds."""
        rule = SamplingRule(temperature=self.temperature, top_p=1.0)
        return [
            TextDraw(rule, 1000 + n, 0, key if self.is_marked else None, self.name, self.bias) for n in range(count)
        ]


ARMS = (
    WritingArm("plain, temperature 1", 1.0, False),
    WritingArm("marked, temperature 1", 1.0, True),
    WritingArm("plain, temperature 0.7", 0.7, False),
    WritingArm("marked, temperature 0.7", 0.7, True),
    WritingArm("plain, greedy", 0.0, False),
    WritingArm("bias 2, greedy", 0.0, True, 2.0),
)


def write_all(
    writer: BatchWriter, prompts: Sequence[Sequence[int]], key: MarkKey, length: int, batch: int
) -> dict[str, list[WrittenText]]:
    """Write one text a prompt in every arm; greedy ones behind the first half of the prompts."""
    texts: dict[str, list[WrittenText]] = {}
    for arm in ARMS:
        count = len(prompts) if arm.temperature else len(prompts) // 2
        draws = arm.make_draws(key, count)
        texts[arm.name] = [
            text
            for start in range(0, count, batch)
            for text in writer.write(prompts[start : min(start + batch, count)], draws[start : start + batch], length)
        ]
    return texts


def quality_rows(writer: BatchWriter, texts: dict[str, list[WrittenText]], key: MarkKey) -> list[Row]:
    """Compare each marked arm with the unmarked one of its temperature, prompt by prompt, and look for the mark."""
    rows = []
    plain: list[float] = []
    for name, written in texts.items():
        nats = [text.nats for text in written]
        if name.startswith("plain"):
            plain = nats
        gaps = [marked - unmarked for marked, unmarked in zip(nats, plain, strict=True)]
        verdicts = [detect_mark(writer.tokenize(text.text), [key]) for text in written]
        rows.append(
            {
                "part": "quality",
                "arm": name,
                "texts": len(written),
                "nats": mean(nats),
                "gap": mean(gaps),
                "gap_error": stdev(gaps) / len(gaps) ** 0.5,
                "repeated": mean(repeated_share(text.tokens) for text in written),
                "found": sum(verdict.verdict == "marked" for verdict in verdicts),
                "median_log10_p": sorted(verdict.log10_p_value for verdict in verdicts)[len(verdicts) // 2],
                "same_tokens": sum(writer.tokenize(text.text) == text.tokens for text in written),
            }
        )
    return rows


def repeated_share(tokens: Sequence[int]) -> float:
    """Return the share of runs of four tokens that stood before in the text."""
    runs = [tuple(tokens[n : n + 4]) for n in range(len(tokens) - 3)]
    return 1 - len(set(runs)) / len(runs)


def _delete(share: float) -> Edit:
    return lambda words, chance: [word for word in words if chance.random() >= share]


def _replace(share: float) -> Edit:
    def edit(words: list[str], chance: random.Random) -> list[str]:
        # a word of the same text, so that it stays about its subject
        return [chance.choice(words) if chance.random() < share else word for word in words]

    return edit


EDITS: dict[str, Edit] = {
    "none": lambda words, _: words,
    "delete 10 %": _delete(0.1),
    "delete 30 %": _delete(0.3),
    "delete 50 %": _delete(0.5),
    "replace 10 %": _replace(0.1),
    "replace 30 %": _replace(0.3),
    "replace 50 %": _replace(0.5),
    "first half": lambda words, _: words[: len(words) // 2],
    "last quarter": lambda words, _: words[-len(words) // 4 :],
    "lower case": lambda words, _: [word.lower() for word in words],
}
"""Edits of words; blanks become single spaces in each of them."""


def robustness_rows(writer: BatchWriter, texts: Sequence[WrittenText], key: MarkKey) -> list[Row]:
    """Edit marked texts and look for the rest of the mark."""
    rows = []
    for name, edit in EDITS.items():
        chance = random.Random(0)  # noqa: S311 - a bench that can be run again
        edited = [" ".join(edit(text.text.split(), chance)) for text in texts]
        verdicts = [detect_mark(writer.tokenize(text), [key]) for text in edited]
        logs = sorted(verdict.log10_p_value for verdict in verdicts)
        rows.append(
            {
                "part": "robustness",
                "edit": name,
                "texts": len(texts),
                "found": sum(log <= -6 for log in logs),
                "at_0.01": sum(log <= -2 for log in logs),
                "median_log10_p": logs[len(logs) // 2],
            }
        )
    return rows
