"""The next token of one choice: penalties, grammar, draw and log-probabilities."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import ModelError
from phalanx.rollouts import SamplerConfig
from phalanx.rollouts.draw import DrawPlace, draw_tokens
from phalanx.serve.engine.grammar import GrammarState
from phalanx.serve.engine.request import SamplingSettings, TokenScore

_EXCLUDED = -1e30
"""Of tokens that a grammar excludes: the draw refuses infinities, which are marks of damage elsewhere."""


class MarkDraw(Protocol):
    """One choice's draw by a keyed mark instead of by its seed."""

    def draw_token(self, logits: Tensor, context: Sequence[int]) -> tuple[int, str]:
        """Return the next token and how it is marked: ``gumbel``, ``bias`` or ``no (reason)``."""
        ...


class TokenChooser:
    """Chooses the tokens of one choice.

    Args:
        settings: Rule of the draw.
        choice: Number of the choice; each draws by noise of its own.
        prompt: Tokens that a repetition penalty counts too.
        logprobs: How many alternatives are scored beside a token; None scores nothing.
        grammar: Form that the text must have.
        mark: Draws instead of the seed.
    """

    def __init__(
        self,
        settings: SamplingSettings,
        choice: int,
        prompt: Sequence[int],
        logprobs: int | None,
        grammar: GrammarState | None,
        mark: MarkDraw | None = None,
    ) -> None:
        self._settings, self._logprobs, self._grammar, self._mark = settings, logprobs, grammar, mark
        self._place = DrawPlace(settings.seed, 0, 0, choice)
        self._rule = SamplerConfig(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p)
        self._ids, self._num_prompt = list(prompt), len(prompt)
        self._counts: Counter[int] = Counter()
        self.mark_name = "no (not configured)"

    @property
    def is_greedy(self) -> bool:
        """Whether the largest bare logit wins and nothing is scored: several rows can be chosen at once."""
        is_bare = self._grammar is None and self._logprobs is None and self._mark is None
        return is_bare and self._settings.is_plain_greedy

    def choose_token(self, logits: Tensor) -> TokenScore:
        """Choose by the logits of one row, ``[vocab]``.

        Raises:
            ModelError: A logit is no finite number.
        """
        adjusted = self._adjust_logits(logits)
        if self._mark is not None:
            token, self.mark_name = self._mark.draw_token(adjusted, self._ids)
        elif self._settings.temperature == 0.0:
            token = int(adjusted.argmax())
        else:
            key = torch.tensor([self._place.key(len(self._ids) - self._num_prompt)])
            token = int(draw_tokens(adjusted[None], key, self._rule)[0])
        self.accept_token(token)
        return score_token(logits, token, self._logprobs) if self._logprobs is not None else TokenScore(token, 0.0)

    def accept_token(self, token: int) -> None:
        """Count a token that was chosen."""
        self._ids.append(token)
        self._counts[token] += 1
        if self._grammar is not None:
            self._grammar.accept_token(token)

    @property
    def is_complete(self) -> bool:
        """Whether the grammar lets nothing follow."""
        return self._grammar is not None and self._grammar.is_complete

    def _adjust_logits(self, logits: Tensor) -> Tensor:
        settings = self._settings
        adjusted = logits.clone()
        if settings.repetition_penalty != 1.0:
            tokens = torch.tensor(sorted(set(self._ids)))
            values = adjusted[tokens]
            penalty = settings.repetition_penalty
            adjusted[tokens] = torch.where(values > 0, values / penalty, values * penalty)
        if self._counts and (settings.frequency_penalty or settings.presence_penalty):
            tokens = torch.tensor(list(self._counts))
            counts = torch.tensor(list(self._counts.values()), dtype=adjusted.dtype)
            adjusted[tokens] -= settings.frequency_penalty * counts + settings.presence_penalty
        for token, bias in settings.logit_bias.items():
            if token < len(adjusted):
                adjusted[token] += bias
        if self._grammar is not None:
            bits = np.unpackbits(np.frombuffer(self._grammar.allowed_bits(), np.uint8), bitorder="little")
            allowed = torch.zeros(len(adjusted), dtype=torch.bool)
            width = min(len(bits), len(adjusted))
            allowed[:width] = torch.from_numpy(bits[:width].astype(bool))
            adjusted.masked_fill_(~allowed, _EXCLUDED)
        return adjusted


def check_finite(logits: Tensor) -> None:
    """Return where all logits are finite; the likeliest of NaN would be token 0.

    Raises:
        ModelError: One is not.
    """
    if not bool(torch.isfinite(logits).all()):
        raise ModelError("a logit is no finite number; the weights are damaged or training had diverged")


def score_token(logits: Tensor, token: int, num_top: int) -> TokenScore:
    """Return the log-probability of a token by the model's bare logits ``[vocab]``, with the likeliest ones."""
    logprobs = logits.float().log_softmax(dim=-1)
    top = logprobs.topk(min(num_top, len(logprobs)))
    pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return TokenScore(token, float(logprobs[token]), pairs)
