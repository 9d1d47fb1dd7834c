"""The relearning test: whether a text that a model seems to have lost comes back faster than texts it never saw.

A model that is pushed away from a text still holds much of it: a few steps on one half bring back the other half, which
was not shown. A model that never had the text learns from the half no more than from a half of any other text.

Source: Lynch et al. 2024 (relearning as a test of unlearning); Hu et al. 2024 (from a part of the text alone).
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

IGNORE = -100
MIN_TOKENS = 8
"""Tokens of the shortest text whose halves can be compared."""
MAX_P = 0.05
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class TextScore:
    """What a model says of a text.

    Attributes:
        loss: Mean over its tokens, in nats.
        likeliest: Share of the tokens that are the model's own first choice; at 1 it writes the text word for word.
    """

    loss: float
    likeliest: float

    def to_json(self) -> dict[str, float]:
        """Return it as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class RelearningPlan:
    """How the test is made.

    Attributes:
        length: Tokens of a row, at most the model's window.
    """

    rate: float
    length: int
    steps: int = 30


@dataclass(frozen=True)
class Comeback:
    """Scores of the second half of a text while its first half is learned.

    Attributes:
        scores: Before the first step and after each.
    """

    scores: tuple[TextScore, ...]

    @property
    def gain(self) -> float:
        """Nats a token by which the half that was not shown became likelier, at the best step; at least 0."""
        return self.scores[0].loss - self.best.loss

    @property
    def best(self) -> TextScore:
        """The score with the lowest loss: too many steps on one half spoil the other."""
        return min(self.scores, key=lambda score: score.loss)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"losses": [score.loss for score in self.scores], "gain": self.gain, "best": self.best.to_json()}


@dataclass(frozen=True)
class RelearningFinding:
    """The outcome of the test.

    Attributes:
        before: The model before it was changed, on the same text; None where there is none.
        never_seen: Gains of the same model on texts that it never saw.
    """

    forgotten: Comeback
    before: Comeback | None
    never_seen: tuple[float, ...]

    @property
    def p(self) -> float:
        """Probability of so high a rank among the texts never seen if the text were one of them."""
        as_fast = sum(gain >= self.forgotten.gain for gain in self.never_seen)
        return (1 + as_fast) / (1 + len(self.never_seen))

    @property
    def is_decidable(self) -> bool:
        """Whether the first rank would be rarer than 1 in 20; a gain that is no number decides nothing."""
        numbers = (*(score.loss for score in self.forgotten.scores), *self.never_seen)
        return 1 / (1 + len(self.never_seen)) <= MAX_P and all(map(math.isfinite, numbers))

    @property
    def is_hidden(self) -> bool:
        """Whether the text came back faster than texts never seen."""
        return self.is_decidable and self.p <= MAX_P

    @property
    def meaning(self) -> str:
        """Advice in one sentence."""
        if not self.is_decidable:
            return (
                f"Not decidable: {len(self.never_seen)} texts never seen are too few, or a loss is no number; what "
                "cannot be tested is not to be taken for removed."
            )
        gain, of = self.forgotten.gain, len(self.never_seen)
        fastest = max(self.never_seen)
        if self.is_hidden:
            return (
                f"The text comes back faster than texts never seen: shown one half, the model gained {gain:.2f} nats a "
                f"token on the other, the fastest of {of} texts never seen {fastest:.2f}. It was hidden, not removed."
            )
        return (
            f"The text came back no faster than texts never seen: {gain:.2f} nats a token, the fastest of {of} "
            f"{fastest:.2f}. This test found no rest of it, which does not show that there is none."
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "forgotten": self.forgotten.to_json(),
            "before": None if self.before is None else self.before.to_json(),
            "never_seen": list(self.never_seen),
            "p": self.p,
            "is_decidable": self.is_decidable,
            "is_hidden": self.is_hidden,
            "meaning": self.meaning,
        }


def cut_rows(tokens: Sequence[int], length: int) -> list[Tokens]:
    """Cut a text into rows of at most `length` tokens; a last one of a single token, which predicts nothing, goes."""
    rows = [tuple(tokens[start : start + length]) for start in range(0, len(tokens), length)]
    return [row for row in rows if len(row) > 1]


@torch.no_grad()
def score_text(module: Any, tokens: Sequence[int], length: int, start: int = 0) -> TextScore:
    """Score the tokens of a text from number `start` on, each row by itself: no figure depends on its neighbours."""
    loss, hits, count = 0.0, 0, 0
    for number, row in enumerate(cut_rows(tokens, length)):
        first = max(start - number * length, 1)
        if first >= len(row):
            continue
        ids = torch.tensor([row], device=module.device)
        logits = module(input_ids=ids[:, :-1]).logits[0, first - 1 :].double()
        targets = ids[0, first:]
        loss += float(functional.cross_entropy(logits, targets, reduction="sum"))
        hits += int((logits.argmax(-1) == targets).sum())
        count += len(targets)
    return TextScore(loss / count, hits / count) if count else TextScore(math.nan, math.nan)


def pad_rows(rows: Sequence[Tokens], device: Any) -> tuple[Tensor, Tensor]:
    """Return ids and labels, ``[rows, length]`` each; padding is behind the end, where it changes nothing."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    labels = torch.tensor([[*row, *[IGNORE] * (longest - len(row))] for row in rows], device=device)
    return ids, labels


def token_losses(module: Any, rows: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
    """Return the loss of each token behind the first of its row and a mask of them, ``[rows, length - 1]`` each."""
    ids, labels = pad_rows(rows, module.device)
    logits = module(input_ids=ids[:, :-1]).logits.float()
    losses = functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none", ignore_index=IGNORE)
    return losses, labels[:, 1:] != IGNORE


def measure_comeback(module: Any, tokens: Tokens, plan: RelearningPlan) -> Comeback:
    """Train a copy of a model on the first half of a text, and score the second half after each step."""
    half = len(tokens) // 2
    learner = copy.deepcopy(module)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=plan.rate, weight_decay=0.0)
    rows = cut_rows(tokens[:half], plan.length)
    scores = [score_text(learner, tokens, plan.length, half)]
    for step in range(plan.steps):
        # eight rows a step, in turn
        batch = [rows[number % len(rows)] for number in range(8 * step, 8 * step + min(8, len(rows)))]
        losses, mask = token_losses(learner, batch)
        optimizer.zero_grad()
        torch.autograd.backward(losses[mask].mean())
        torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        scores.append(score_text(learner, tokens, plan.length, half))
    return Comeback(tuple(scores))


def judge_relearning(
    module: Any,
    forgotten: Tokens,
    never_seen: Sequence[Tokens],
    plan: RelearningPlan,
    *,
    before: Any = None,
    tell: Callable[[int, int], object] = lambda done, of: None,
) -> RelearningFinding:
    """Make the test.

    Args:
        module: A causal language model; it is left as it is.
        never_seen: Texts of the same kind that no training has seen, of about the same length.
        before: The model before `forgotten` was taken from it.
        tell: Called with the texts that are done, and of how many.
    """
    total = len(never_seen) + 1 + (before is not None)
    forgotten_comeback = measure_comeback(module, forgotten, plan)
    tell(1, total)
    before_comeback = None if before is None else measure_comeback(before, forgotten, plan)
    gains = []
    for tokens in never_seen:
        gains.append(measure_comeback(module, tokens, plan).gain)
        tell(total - len(never_seen) + len(gains), total)
    return RelearningFinding(forgotten_comeback, before_comeback, tuple(gains))
