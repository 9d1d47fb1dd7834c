"""The promises of a mark, counted: the distribution of draws, false alarms, and the tokens that a sign takes."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from phalanx.models.token_draw import draw_tokens, uniform_numbers
from phalanx.serve.marks import MarkKey, TextDraw, detect_mark, draw_next
from phalanx.serve.marks.detect import log_gamma_tail
from phalanx.serve.marks.race import CONTEXT_TOKENS, LANES, mark_row_key, mark_row_keys
from phalanx.serve.sampling import SamplingRule

Row = dict[str, Any]

PLAIN = SamplingRule(temperature=1.0, top_p=1.0)
LIMIT = 1e-6
_LENGTH = 7
_VOCAB = 4096
_ALPHA = 0.01


class ForgetfulDraw(TextDraw):
    """A mark without deduplication: a context is used as often as it comes."""

    def take_token(self, token: int) -> None:
        """Go on, and forget which contexts were used."""
        super().take_token(token)
        self._seen.clear()


def drawn_keys(count: int, seed: int) -> list[MarkKey]:
    """Return keys that a seed decides, so that a bench can be run again."""
    content = torch.randint(0, 256, (count, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return [MarkKey(1, bytes(row)) for row in content.tolist()]


def marginal_rows(num_keys: int) -> list[Row]:
    """Compare draws over many keys with the model's distribution, token by token and text by text."""
    rows = []
    logits = torch.linspace(2.0, -3.0, 32)
    keys = drawn_keys(num_keys, 0)
    race_keys = torch.tensor([mark_row_key(key, 0, (1, 2, 3, 4)) for key in keys])
    for temperature in (1.0, 0.5):
        rule = SamplingRule(temperature=temperature, top_p=1.0)
        tokens, _ = draw_tokens(logits.repeat(num_keys, 1), race_keys, rule)
        shares = dict(enumerate((logits / temperature).softmax(0).tolist()))
        rows.append(
            {"what": "token", "temperature": temperature} | _chi_square(Counter(tokens.tolist()), shares, num_keys)
        )
    for name, kind in (("text", TextDraw), ("text without deduplication", ForgetfulDraw)):
        counts: Counter[tuple[int, ...]] = Counter()
        for start in range(0, num_keys, 10_000):
            part = keys[start : start + 10_000]
            draws = [kind(PLAIN, start + number, 0, key, "gumbel") for number, key in enumerate(part)]
            counts.update(map(tuple, _write_sticky(draws)))
        rows.append({"what": name, "temperature": 1.0} | _chi_square(counts, _sticky_shares(), num_keys))
    return [{"part": "marginal", **row} for row in rows]


def _sticky(last: int) -> Tensor:
    """A model of two tokens that likes to repeat itself, so that contexts come again at once."""
    return torch.tensor([1.5, 0.0]) if last == 0 else torch.tensor([0.0, 1.0])


def _write_sticky(draws: Sequence[TextDraw]) -> list[list[int]]:
    texts: list[list[int]] = [[] for _ in draws]
    table = torch.stack([_sticky(0), _sticky(1)])
    for _ in range(_LENGTH):
        lasts = torch.tensor([text[-1] if text else 0 for text in texts])
        tokens, _ = draw_next(draws, table[lasts])
        for text, token in zip(texts, tokens.tolist(), strict=True):
            text.append(token)
    return texts


def _sticky_shares() -> dict[tuple[int, ...], float]:
    shares = {}
    for cells in product((0, 1), repeat=_LENGTH):
        lasts = (0, *cells[:-1])
        shares[cells] = math.exp(
            sum(float(_sticky(last).log_softmax(0)[cell]) for last, cell in zip(lasts, cells, strict=True))
        )
    return shares


def _chi_square(counts: "Counter[Any]", shares: dict[Any, float], total: int) -> Row:
    distance = sum((counts.get(cell, 0) - share * total) ** 2 / (share * total) for cell, share in shares.items())
    freedom = len(shares) - 1
    p_value = float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(distance / 2).double()))
    return {"keys": total, "cells": len(shares), "chi_square": distance, "p_value": p_value}


def false_alarm_rows(documents: Sequence[tuple[str, Sequence[int]]], keys: Sequence[MarkKey]) -> list[Row]:
    """Judge documents that nobody marked; with and without deduplication."""
    rows: dict[tuple[str, str], list[float]] = {}
    for number, (kind, tokens) in enumerate(documents):
        key = keys[number % len(keys)]
        verdict = detect_mark(tokens, [key])
        if verdict.verdict == "cannot tell" and verdict.p_value == 1.0 and verdict.num_tokens < 16:
            rows.setdefault((kind, "too short"), []).append(1.0)
            continue
        rows.setdefault((kind, "deduplicated"), []).append(verdict.p_value)
        rows.setdefault((kind, "every place"), []).append(_judge_every_place(tokens, key))
    for name in ("deduplicated", "every place"):
        rows["all", name] = [p for (_, way), values in list(rows.items()) if way == name for p in values]
    return [
        {"part": "false alarms", "kind": kind, "way": way, "documents": len(values)}
        | {f"at_{limit:g}": sum(p <= limit for p in values) for limit in (_ALPHA, 1e-3, LIMIT)}
        for (kind, way), values in rows.items()
    ]


def _judge_every_place(tokens: Sequence[int], key: MarkKey) -> float:
    """Return the p-value of a detector that counts a context as often as it comes."""
    contexts = [tuple(tokens[n - CONTEXT_TOKENS : n]) for n in range(CONTEXT_TOKENS, len(tokens))]
    chosen = torch.tensor(tokens[CONTEXT_TOKENS:])[:, None]
    best = 0.0
    for lane in range(LANES):
        numbers = uniform_numbers(mark_row_keys(key, lane, contexts), chosen)
        best = min(best, log_gamma_tail(len(contexts), -float(torch.log1p(-numbers).sum())))
    return min(1.0, LANES * math.exp(best))


def entropy_rows(texts: int, entropies: Sequence[float]) -> list[Row]:
    """Count the tokens until the p-value is at most 1e-6, for models of one entropy at every place."""
    return [{"part": "tokens needed", **_tokens_needed(texts, entropy)} for entropy in entropies]


def _tokens_needed(texts: int, entropy: float) -> Row:
    logits = _logits_of_entropy(entropy)
    max_tokens = int(60 + 250 / entropy**1.2)
    generator = torch.Generator().manual_seed(int(1000 * entropy))
    scores = torch.zeros(texts, dtype=torch.float64)
    needed: list[int | None] = [None] * texts
    for count in range(1, max_tokens + 1):
        keys = torch.randint(-(2**63), 2**63 - 1, (texts, 2), generator=generator)
        tokens, _ = draw_tokens(logits.repeat(texts, 1), keys, PLAIN)
        scores -= torch.log1p(-uniform_numbers(keys, tokens[:, None])[:, 0])
        for number, score in enumerate(scores.tolist()):
            if needed[number] is None and log_gamma_tail(count, score) + math.log(LANES) <= math.log(LIMIT):
                needed[number] = count
        if None not in needed:
            break
    ranked = sorted(max_tokens + 1 if value is None else value for value in needed)
    return {
        "nats": entropy,
        "texts": texts,
        "median": ranked[texts // 2],
        "of_90_percent": ranked[int(0.9 * texts)],
        "not_found": sum(value is None for value in needed),
    }


def _logits_of_entropy(entropy: float) -> Tensor:
    """Return the logits of a Zipf law whose exponent gives this entropy."""
    ranks = torch.arange(1, _VOCAB + 1, dtype=torch.float64).log()
    low, high = 0.0, 60.0
    for _ in range(80):
        middle = (low + high) / 2
        logprobs = (-middle * ranks).log_softmax(0)
        if float(-(logprobs.exp() * logprobs).sum()) > entropy:
            low = middle
        else:
            high = middle
    return -low * ranks


def cost_rows(vocab_size: int, rounds: int) -> list[Row]:
    """Time a draw with a mark, one by a seed alone, and one of torch's own, in turns; milliseconds of CPU a token."""
    rows = []
    for batch in (1, 8):
        logits = 2 * torch.randn((batch, vocab_size), generator=torch.Generator().manual_seed(0))
        spent: dict[str, float] = {"marked": 0.0, "seeded": 0.0, "torch": 0.0}
        key = MarkKey(1, bytes(32))
        draws = {
            "marked": [TextDraw(PLAIN, number, 0, key, "gumbel") for number in range(batch)],
            "seeded": [TextDraw(PLAIN, number, 0, None, "no (off)") for number in range(batch)],
        }
        for turn in range(rounds):
            for way in sorted(spent, reverse=bool(turn % 2)):
                started = time.process_time()
                if way == "torch":
                    torch.multinomial(logits.softmax(-1), 1)
                else:
                    draw_next(draws[way], logits)
                spent[way] += time.process_time() - started
        row = {f"{way}_ms": 1e3 * seconds / rounds / batch for way, seconds in spent.items()}
        rows.append({"part": "cost", "batch": batch, "vocab": vocab_size, **row})
    return rows
