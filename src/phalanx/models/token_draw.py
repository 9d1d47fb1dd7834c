"""The draw of a token: a race of logits and keyed noise, for rollouts, served texts and marked texts alike.

Every token of the vocabulary gets a number from a standard Gumbel distribution, as a function of the row's key and the
token. The token with the largest sum of scaled logit and number wins, which is an exact draw from the softmax
(Gumbel-max). A checker with slightly different logits finds the same winner, or another one with a lead as small as
that difference: this lead, in logits, is the margin of a draw. The keys decide on the kind of a draw: a public
function of a place (rollouts), of a request's seed (serving), or of a secret and the last tokens (marked text).

Source: Maddison et al. 2014 (Gumbel-max); Karvonen et al. 2025, arXiv 2511.20621 (margins of seeded draws).
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from phalanx.errors import ModelError

KEY_BYTES = 16
# finaliser of SplitMix64 (Steele et al. 2014), as signed 64-bit numbers: torch has no unsigned ones to multiply
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_MAX_UNIFORM = 1 - 2.0**-53
_FEW = 64
_CACHED_NUMBERS = 2**16


@runtime_checkable
class DrawRule(Protocol):
    """The numbers that decide who takes part in a race, by the names that every sampler uses."""

    @property
    def temperature(self) -> float:
        """Divides the logits; 0 takes the likeliest token."""

    @property
    def top_k(self) -> int:
        """Draw from so many likeliest tokens; 0 for all."""

    @property
    def top_p(self) -> float:
        """Draw from the likeliest tokens that have this share together."""


@dataclass(frozen=True)
class DrawCheck:
    """Draws that were run again.

    Attributes:
        margins: Logits by which a claimed token lost its race, float64 ``[rows]``; 0 where it won, infinity where the
            rule excludes it.
        differs: Whether another token won, ``[rows]``.
        logprobs: Log-probabilities of the claimed tokens, float64 ``[rows]``.
    """

    margins: Tensor
    differs: Tensor
    logprobs: Tensor


def row_key(digest: bytes) -> tuple[int, int]:
    """Return `KEY_BYTES` bytes as the key of a row: two signed 64-bit numbers."""
    return int.from_bytes(digest[:8], "big", signed=True), int.from_bytes(digest[8:KEY_BYTES], "big", signed=True)


def uniform_numbers(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return a number between 0 and 1, both excluded, for each pair of row and token, float64.

    Args:
        keys: Keys from `row_key`, int64 ``[rows, 2]``.
        tokens: int64, ``[vocab]`` for every row the same ones, or ``[rows, tokens]``.
    """
    bits = _mix_bits(_mix_bits(tokens * _GOLDEN + keys[:, :1]).bitwise_xor_(keys[:, 1:]))
    uniform = _shift_bits(bits, 11).double().add_(0.5).mul_(2.0**-53)
    # the largest of 2^53 values is rounded to 1
    return uniform.clamp_(max=_MAX_UNIFORM)


def row_numbers(keys: Tensor, vocab_size: int) -> Tensor:
    """Return `uniform_numbers` of a whole vocabulary, float64 ``[rows, vocab]``."""
    tokens = torch.arange(vocab_size, dtype=torch.int64, device=keys.device)
    if keys.device.type != "cpu":
        return uniform_numbers(keys, tokens)
    # few rows at a time stay in the cache of a processor: four times as fast at eight rows of 49,152 tokens
    numbers = torch.empty((len(keys), vocab_size), dtype=torch.float64)
    step = max(1, _CACHED_NUMBERS // vocab_size)
    for start in range(0, len(keys), step):
        numbers[start : start + step] = uniform_numbers(keys[start : start + step], tokens)
    return numbers


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel numbers, float64 ``[rows, vocab]``.

    Args:
        keys: Keys from `row_key`, int64 ``[rows, 2]``.
    """
    noise = row_numbers(keys, vocab_size)
    return noise.log_().neg_().log_().neg_()


def draw_tokens(
    logits: Tensor, keys: Tensor, rule: DrawRule, *, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token a row.

    Args:
        logits: ``[rows, vocab]``.
        keys: int64 ``[rows, 2]``.
        allowed: Tokens that a grammar lets in, bool ``[rows, vocab]``, at least one a row; None for all.

    Returns:
        Tokens, int64 ``[rows]``, and their log-probabilities, float64 ``[rows]``.
    """
    scaled = scale_logits(logits, rule, allowed)
    tokens = _race_winners(scaled, _race_scores(scaled, keys, rule), rule)
    return tokens, token_logprobs(scaled, tokens)


def check_draws(logits: Tensor, keys: Tensor, tokens: Tensor, rule: DrawRule, tolerance: float) -> DrawCheck:
    """Run draws again and say by how much each claimed token lost.

    Args:
        logits: The checker's, ``[rows, vocab]``.
        keys: int64 ``[rows, 2]``.
        tokens: Claimed tokens, int64 ``[rows]``, inside the vocabulary.
        tolerance: Logits by which honest computations may differ. Where top-k or top-p cuts that close to a token, the
            token may be in the race and need not be.
    """
    scaled = scale_logits(logits, rule)
    scores = _race_scores(scaled, keys, rule)
    differs = _race_winners(scaled, scores, rule) != tokens
    margins = torch.zeros(len(tokens), dtype=torch.float64, device=scaled.device)
    if bool(differs.any()):
        margins[differs] = _race_margins(scaled[differs], scores[differs], tokens[differs], rule, tolerance)
    return DrawCheck(margins, differs, token_logprobs(scaled, tokens))


def scale_logits(logits: Tensor, rule: DrawRule, allowed: Tensor | None = None) -> Tensor:
    """Return logits by the temperature, float64; minus infinity where a token is not allowed."""
    if not bool(torch.isfinite(logits).all()):
        raise ModelError("a logit is no finite number; the weights are damaged or training had diverged")
    scaled = logits.double() / _divisor(rule)
    if allowed is None:
        return scaled
    if not bool(allowed.any(dim=-1).all()):
        raise ModelError("no token is allowed to come next; the grammar leaves no way on")
    return scaled.masked_fill(~allowed, -torch.inf)


def token_logprobs(scaled: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of one token a row, float64 ``[rows]``."""
    return scaled.gather(1, tokens[:, None])[:, 0] - scaled.logsumexp(dim=-1)


def _divisor(rule: DrawRule) -> float:
    """Return the divisor of the logits; a greedy draw reports log-probabilities at temperature 1."""
    return rule.temperature or 1.0


def _race_winners(scaled: Tensor, scores: Tensor, rule: DrawRule) -> Tensor:
    if rule.top_k or rule.top_p < 1.0:
        scores = scores.masked_fill(~_allowed_tokens(scaled, rule, 0.0), -torch.inf)
    return scores.argmax(dim=-1)


def _race_margins(scaled: Tensor, scores: Tensor, tokens: Tensor, rule: DrawRule, tolerance: float) -> Tensor:
    """Return by how many logits tokens lost to certain participants of the draw; infinity for excluded ones."""
    slack = tolerance / _divisor(rule)
    best = scores.masked_fill(~_allowed_tokens(scaled, rule, -slack), -torch.inf).amax(dim=-1)
    lost = ((best - scores.gather(1, tokens[:, None])[:, 0]) * _divisor(rule)).clamp(min=0.0)
    takes_part = _allowed_tokens(scaled, rule, slack).gather(1, tokens[:, None])[:, 0]
    return lost.masked_fill(~takes_part, torch.inf)


def _race_scores(scaled: Tensor, keys: Tensor, rule: DrawRule) -> Tensor:
    if rule.temperature == 0.0:
        return scaled.clone()
    return gumbel_noise(keys, scaled.shape[-1]).add_(scaled)


def _allowed_tokens(scaled: Tensor, rule: DrawRule, slack: float) -> Tensor:
    """Tokens that take part, ``[rows, vocab]``: more than the rule says with positive slack, fewer with negative.

    All tokens with the logit of the last one that is let in are let in.
    """
    cut = torch.full_like(scaled[:, :1], -torch.inf)
    if 0 < rule.top_k < scaled.shape[-1]:
        cut = scaled.topk(rule.top_k, dim=-1).values[:, -1:]
    if rule.top_p < 1.0:
        share = min(1.0, max(0.0, rule.top_p + 2 * slack))
        cut = torch.maximum(cut, _share_cut(scaled, cut, share))
    # the likeliest token takes part whatever the slack
    return scaled >= torch.minimum(cut - 2 * slack, scaled.amax(dim=-1, keepdim=True))


def _share_cut(scaled: Tensor, cut: Tensor, share: float) -> Tensor:
    """Return the logit of the last of the likeliest tokens with this share of the mass at or above `cut`."""
    log_total = scaled.masked_fill(scaled < cut, -torch.inf).logsumexp(dim=-1, keepdim=True)
    few = min(_FEW, scaled.shape[-1])
    while True:
        values = scaled.topk(few, dim=-1).values
        reached = (values - log_total).exp().cumsum(dim=-1)
        if few == scaled.shape[-1] or bool((reached[:, -1] >= share).all()):
            break
        few = min(few * 8, scaled.shape[-1])
    last = (reached < share).sum(dim=-1, keepdim=True).clamp(max=few - 1)
    return values.gather(1, last)


def _mix_bits(bits: Tensor) -> Tensor:
    """Mix numbers in place."""
    bits.bitwise_xor_(_shift_bits(bits, 30)).mul_(_MIX_1)
    bits.bitwise_xor_(_shift_bits(bits, 27)).mul_(_MIX_2)
    return bits.bitwise_xor_(_shift_bits(bits, 31))


def _shift_bits(bits: Tensor, by: int) -> Tensor:
    # a shift of signed numbers repeats the sign
    return (bits >> by).bitwise_and_(2 ** (64 - by) - 1)
