"""The draw of served text, with and without a mark."""

from collections.abc import Sequence
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from phalanx.config import StrictModel
from phalanx.errors import ConfigError
from phalanx.models.token_draw import DrawRule, draw_tokens, row_numbers, scale_logits, token_logprobs
from phalanx.serve.marks.keys import MarkKey
from phalanx.serve.marks.race import CONTEXT_TOKENS, LANES, Context, mark_row_key, seed_row_key


class MarkPolicy(StrictModel):
    """The section ``[mark]`` of a server's file.

    Attributes:
        mark: ``required`` marks every text or refuses the request; with ``on`` callers whose key allows it may opt out.
        greedy: At temperature 0 nothing is drawn: ``bias`` adds a keyed number to each logit, ``refuse`` refuses the
            request, ``plain`` writes without a mark and says so.
        bias: The largest such number, in nats: no token is taken that is more than this below the likeliest.
    """

    mark: Literal["off", "on", "required"] = "on"
    greedy: Literal["bias", "refuse", "plain"] = "bias"
    bias: float = Field(default=2.0, gt=0.0, le=10.0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.mark == "required" and self.greedy == "plain":
            raise ValueError('mark = "required" and greedy = "plain" exclude each other; set greedy = "bias"')
        return self


class MarkRefused(ConfigError):  # noqa: N818 - a verdict on a request, named as the routes speak of it
    """A request asks for text without a mark where the policy does not allow that."""


class TextDraw:
    """One text while it is written: the keys of its next races.

    Attributes:
        mark_name: ``gumbel``, ``bias`` or ``no (reason)``, for the answer and the log.
        num_marked: Tokens so far whose race was keyed by the secret.
    """

    def __init__(
        self, rule: DrawRule, seed: int, sample: int, key: MarkKey | None, mark_name: str, bias: float = 0.0
    ) -> None:
        self.rule, self.mark_name, self.bias = rule, mark_name, bias
        self.num_marked = 0
        self._seed, self._sample, self._key = seed, sample, key
        self._lane = (seed + sample) % LANES
        self._tokens: list[int] = []
        self._seen = set[Context]()
        self._position = 0

    def next_key(self) -> tuple[tuple[int, int], bool]:
        """Return the key of the next race, and whether it carries the mark."""
        context = tuple(self._tokens)
        if self._key is None or len(context) < CONTEXT_TOKENS or context in self._seen:
            return seed_row_key(self._seed, self._sample, self._position), False
        return mark_row_key(self._key, self._lane, context), True

    def take_token(self, token: int) -> None:
        """Go on behind a token, whether it was drawn or forced."""
        context = tuple(self._tokens)
        if self._key is not None and len(context) == CONTEXT_TOKENS and context not in self._seen:
            self._seen.add(context)
            self.num_marked += 1
        self._tokens = [*self._tokens, token][-CONTEXT_TOKENS:]
        self._position += 1


class TokenMark:
    """Draws tokens by a policy.

    Args:
        policy: The server's, for every text.
        key: The newest of a `MarkKeyRing`; None only where the policy marks nothing.
    """

    def __init__(self, policy: MarkPolicy, key: MarkKey | None) -> None:
        if policy.mark != "off" and key is None:
            raise ConfigError('mark: needs a key file; `phalanx mark new-keys PATH` makes one, or set mark = "off"')
        self._policy, self._key = policy, key

    def begin_text(
        self, rule: DrawRule, seed: int, sample: int = 0, *, wants_mark: bool = True, may_skip: bool = False
    ) -> TextDraw:
        """Begin a text.

        Args:
            rule: Temperature, top-k and top-p of the request.
            seed: The request's seed; the server draws a seed where the client gives none.
            sample: Number of the text within its request.
            wants_mark: The request asks for a mark, or does not say.
            may_skip: The caller's key allows text without a mark.
        """
        policy = self._policy
        if policy.mark == "off":
            return TextDraw(rule, seed, sample, None, "no (off)")
        if not wants_mark:
            if policy.mark == "required" or not may_skip:
                raise MarkRefused("mark: this key may not have text without a mark; leave the field out")
            return TextDraw(rule, seed, sample, None, "no (caller)")
        if rule.temperature == 0.0 and policy.greedy != "bias":
            if policy.greedy == "refuse":
                raise MarkRefused("mark: greedy text cannot be marked by this server; set a temperature above 0")
            return TextDraw(rule, seed, sample, None, "no (greedy)")
        if rule.temperature == 0.0:
            return TextDraw(rule, seed, sample, self._key, "bias", policy.bias)
        return TextDraw(rule, seed, sample, self._key, "gumbel")

    def draw_token(self, logits: Tensor, text: TextDraw, allowed: Tensor | None = None) -> tuple[int, str]:
        """Draw the next token of one text and go on behind it.

        Args:
            logits: ``[vocab]``.
            allowed: Tokens that a grammar lets in, bool ``[vocab]``.

        Returns:
            The token, and `TextDraw.mark_name`.

        Raises:
            ModelError: A logit is no finite number, or no token is allowed.
        """
        tokens, _ = draw_next([text], logits[None], None if allowed is None else allowed[None])
        return int(tokens[0]), text.mark_name


def draw_next(texts: Sequence[TextDraw], logits: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Draw the next token of every text of a batch, and go on behind each.

    Args:
        texts: One a row; their rules may differ.
        logits: ``[rows, vocab]``.
        allowed: Tokens that grammars let in, bool ``[rows, vocab]``; None for all.

    Returns:
        Tokens, int64 ``[rows]``, and their log-probabilities under the model, float64 ``[rows]``.

    Raises:
        ModelError: A logit is no finite number, or a row allows no token.
    """
    tokens = torch.empty(len(texts), dtype=torch.int64)
    logprobs = torch.empty(len(texts), dtype=torch.float64)
    for rows in _rows_by_rule(texts):
        part = logits[rows]
        masks = None if allowed is None else allowed[rows]
        tokens[rows], logprobs[rows] = _draw_alike([texts[row] for row in rows], part, masks)
    for text, token in zip(texts, tokens.tolist(), strict=True):
        text.take_token(token)
    return tokens, logprobs


def _rows_by_rule(texts: Sequence[TextDraw]) -> list[list[int]]:
    rows: dict[tuple[float, int, float, float], list[int]] = {}
    for row, text in enumerate(texts):
        rule = text.rule
        rows.setdefault((rule.temperature, rule.top_k, rule.top_p, text.bias), []).append(row)
    return list(rows.values())


def _draw_alike(texts: Sequence[TextDraw], logits: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draw for texts of one rule."""
    rule, bias = texts[0].rule, texts[0].bias
    keys, are_marked = zip(*(text.next_key() for text in texts), strict=True)
    row_keys = torch.tensor(keys, device=logits.device)
    if not bias:
        return draw_tokens(logits, row_keys, rule, allowed=allowed)
    scaled = scale_logits(logits, rule, allowed)
    strength = bias * torch.tensor(are_marked, dtype=torch.float64, device=logits.device)[:, None]
    tokens = (scaled + strength * row_numbers(row_keys, logits.shape[-1])).argmax(dim=-1)
    return tokens, token_logprobs(scaled, tokens)
