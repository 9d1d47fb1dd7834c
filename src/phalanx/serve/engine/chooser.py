"""The next tokens of choices: penalties, grammar, draw or mark, and log-probabilities."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import ModelError, PhalanxError
from phalanx.serve.engine.grammar import GrammarState
from phalanx.serve.engine.request import SamplingSettings, TokenScore
from phalanx.serve.marks import TextDraw, draw_next

_MAX_LOGIT = 1e30


class TokenChooser:
    """Chooses the tokens of one choice.

    Args:
        prompt: Tokens that a repetition penalty counts too.
        logprobs: Number of alternatives that are scored beside a token; None scores nothing.
        grammar: Form that the text must have.
        draw: Draws by the request's seed, or by the key of a mark.
    """

    def __init__(
        self,
        settings: SamplingSettings,
        prompt: Sequence[int],
        logprobs: int | None,
        grammar: GrammarState | None,
        draw: TextDraw,
    ) -> None:
        self._settings, self.logprobs, self.grammar, self.draw = settings, logprobs, grammar, draw
        self._prompt_tokens = set(prompt) if settings.repetition_penalty != 1.0 else set()
        self._counts: Counter[int] = Counter()

    @property
    def is_bare_greedy(self) -> bool:
        """Whether the token of the largest bare logit is taken."""
        is_bare = self.grammar is None and self.draw.bias == 0.0
        return is_bare and self._settings.is_plain_greedy

    @property
    def mark_name(self) -> str:
        """How the text is marked."""
        return self.draw.mark_name

    @property
    def is_complete(self) -> bool:
        """Whether the grammar lets nothing follow."""
        return self.grammar is not None and self.grammar.is_complete

    def accept_token(self, token: int) -> None:
        """Count a token that was chosen."""
        if self._settings.has_penalties:
            self._counts[token] += 1
        if self.grammar is not None:
            self.grammar.accept_token(token)

    def adjust_logits(self, logits: Tensor) -> Tensor:
        """Return logits ``[vocab]`` with penalties and biases."""
        settings = self._settings
        if not settings.has_penalties and not settings.logit_bias:
            return logits
        adjusted = logits.clone()
        if settings.repetition_penalty != 1.0:
            tokens = torch.tensor(sorted(self._prompt_tokens | self._counts.keys()))
            values, penalty = adjusted[tokens], settings.repetition_penalty
            adjusted[tokens] = torch.where(values > 0, values / penalty, values * penalty)
        if self._counts:
            tokens = torch.tensor(list(self._counts))
            counts = torch.tensor(list(self._counts.values()), dtype=adjusted.dtype)
            adjusted[tokens] -= settings.frequency_penalty * counts + settings.presence_penalty
        for token, bias in settings.logit_bias.items():
            if token < len(adjusted):
                adjusted[token] += bias
        # a penalty near 0 would make a logit infinite, which no draw takes, and the whole batch would end with an error
        return adjusted.clamp(-_MAX_LOGIT, _MAX_LOGIT)

    def allowed_tokens(self, vocab_size: int) -> Tensor | None:
        """Return which tokens the grammar lets follow, bool ``[vocab]``; None for all.

        Raises:
            BadRequestError: The grammar takes more than its bounds.
        """
        if self.grammar is None:
            return None
        bits = np.unpackbits(np.frombuffer(self.grammar.allowed_bits(), np.uint8), bitorder="little")
        allowed = torch.zeros(vocab_size, dtype=torch.bool)
        width = min(len(bits), vocab_size)
        allowed[:width] = torch.from_numpy(bits[:width].astype(bool))
        return allowed


def choose_tokens(choosers: Sequence[TokenChooser], logits: Tensor) -> list[TokenScore | PhalanxError]:
    """Choose the next token of every row, and count it.

    Args:
        logits: ``[rows, vocab]``.

    Returns:
        For each row its token, or why its own grammar leaves none.
    """
    results: dict[int, TokenScore | PhalanxError] = {}
    greedy = [row for row, chooser in enumerate(choosers) if chooser.is_bare_greedy]
    drawn = [row for row, chooser in enumerate(choosers) if not chooser.is_bare_greedy and chooser.grammar is None]
    tokens: dict[int, int] = {}
    if greedy:
        tokens |= zip(greedy, logits[greedy].argmax(dim=-1).tolist(), strict=True)
    if drawn:
        adjusted = torch.stack([choosers[row].adjust_logits(logits[row]) for row in drawn])
        winners, _ = draw_next([choosers[row].draw for row in drawn], adjusted)
        tokens |= zip(drawn, winners.tolist(), strict=True)
    for row in set(range(len(choosers))) - tokens.keys():
        chooser = choosers[row]
        try:
            allowed = chooser.allowed_tokens(logits.shape[-1])
            mask = None if allowed is None else allowed[None]
            winners, _ = draw_next([chooser.draw], chooser.adjust_logits(logits[row])[None], mask)
            tokens[row] = int(winners[0])
        except PhalanxError as exc:
            results[row] = exc
    for row, token in tokens.items():
        choosers[row].accept_token(token)
        num_top = choosers[row].logprobs
        results[row] = TokenScore(token, 0.0) if num_top is None else score_token(logits[row], token, num_top)
    return [results[row] for row in range(len(choosers))]


def check_finite(logits: Tensor) -> None:
    """Return where all logits are finite; the likeliest of NaN would be token 0.

    Raises:
        ModelError: One is not.
    """
    # one pass: the extremes of numbers of which one is NaN are NaN
    if logits.numel() and not all(map(math.isfinite, map(float, logits.aminmax()))):
        raise ModelError("a logit is no finite number; the weights are damaged or training had diverged")


def score_token(logits: Tensor, token: int, num_top: int) -> TokenScore:
    """Return the log-probability of a token by the model's bare logits ``[vocab]``, with the likeliest ones."""
    logprobs = logits.float().log_softmax(dim=-1)
    top = logprobs.topk(min(num_top, len(logprobs)))
    pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return TokenScore(token, float(logprobs[token]), pairs)
