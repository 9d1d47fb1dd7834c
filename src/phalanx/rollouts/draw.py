"""The seeded draw of a token: a race of logits and public noise, which a checker runs again.

Every token of the vocabulary gets a number from a standard Gumbel distribution, as a public function of seed, step,
prompt, sample, position and token. The token with the largest sum of scaled logit and number wins, which is an exact
draw from the softmax (Gumbel-max). A checker with slightly different logits finds the same winner, or another one with
a lead as small as that difference: this lead, in logits, is the margin of a draw.

Source: Maddison et al. 2014 (Gumbel-max); Karvonen et al. 2025, arXiv 2511.20621 (margins of seeded draws).
"""

from dataclasses import dataclass

import torch
from blake3 import blake3
from torch import Tensor

from phalanx.config import canonical_json
from phalanx.errors import ModelError
from phalanx.rollouts.request import SamplerConfig
from phalanx.security.crypto import in_domain

_DOMAIN = "rollout-draw/1"
# finaliser of SplitMix64 (Steele et al. 2014), as signed 64-bit numbers: torch has no unsigned ones to multiply
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_FEW = 64


@dataclass(frozen=True)
class DrawPlace:
    """The place of a text: with a position in it, the key of a draw."""

    seed: int
    step: int
    prompt: int
    sample: int

    def key(self, position: int) -> tuple[int, int]:
        """Two signed 64-bit numbers."""
        place = [self.seed, self.step, self.prompt, self.sample, position]
        digest = blake3(in_domain(_DOMAIN, canonical_json(place))).digest(16)
        return int.from_bytes(digest[:8], "big", signed=True), int.from_bytes(digest[8:], "big", signed=True)


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


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Return public standard Gumbel numbers, float64 ``[rows, vocab]``.

    Args:
        keys: Keys from `DrawPlace.key`, int64 ``[rows, 2]``.
    """
    tokens = torch.arange(vocab_size, dtype=torch.int64, device=keys.device)
    bits = _mix_bits(_mix_bits(tokens * _GOLDEN + keys[:, :1]) ^ keys[:, 1:])
    uniform = (((bits >> 11) & (2**53 - 1)).double() + 0.5) * 2.0**-53
    noise: Tensor = uniform.log_().neg_().log_().neg_()
    return noise


def draw_tokens(logits: Tensor, keys: Tensor, sampler: SamplerConfig) -> tuple[Tensor, Tensor]:
    """Draw one token a row.

    Args:
        logits: ``[rows, vocab]``.
        keys: int64 ``[rows, 2]``.

    Returns:
        Tokens, int64 ``[rows]``, and their log-probabilities, float64 ``[rows]``.

    Raises:
        ModelError: A logit is no finite number.
    """
    scaled = _scale_logits(logits, sampler)
    tokens = _race_winners(scaled, _race_scores(scaled, keys, sampler), sampler)
    return tokens, _token_logprobs(scaled, tokens)


def check_draws(logits: Tensor, keys: Tensor, tokens: Tensor, sampler: SamplerConfig, tolerance: float) -> DrawCheck:
    """Run draws again and say by how much each claimed token lost.

    Args:
        logits: The checker's, ``[rows, vocab]``.
        keys: int64 ``[rows, 2]``.
        tokens: Claimed tokens, int64 ``[rows]``, inside the vocabulary.
        tolerance: Logits by which honest computations may differ. Where top-k or top-p cuts that close to a token, the
            token may be in the race and need not be.

    Raises:
        ModelError: A logit of the checker is no finite number.
    """
    scaled = _scale_logits(logits, sampler)
    scores = _race_scores(scaled, keys, sampler)
    differs = _race_winners(scaled, scores, sampler) != tokens
    margins = torch.zeros(len(tokens), dtype=torch.float64, device=scaled.device)
    if bool(differs.any()):
        margins[differs] = _race_margins(scaled[differs], scores[differs], tokens[differs], sampler, tolerance)
    return DrawCheck(margins, differs, _token_logprobs(scaled, tokens))


def _race_winners(scaled: Tensor, scores: Tensor, sampler: SamplerConfig) -> Tensor:
    if sampler.top_k or sampler.top_p < 1.0:
        scores = scores.masked_fill(~_allowed_tokens(scaled, sampler, 0.0), -torch.inf)
    return scores.argmax(dim=-1)


def _race_margins(scaled: Tensor, scores: Tensor, tokens: Tensor, sampler: SamplerConfig, tolerance: float) -> Tensor:
    """Return by how many logits tokens lost to certain participants of the draw; infinity for excluded ones."""
    slack = tolerance / sampler.divisor
    best = scores.masked_fill(~_allowed_tokens(scaled, sampler, -slack), -torch.inf).amax(dim=-1)
    lost = ((best - scores.gather(1, tokens[:, None])[:, 0]) * sampler.divisor).clamp(min=0.0)
    takes_part = _allowed_tokens(scaled, sampler, slack).gather(1, tokens[:, None])[:, 0]
    return lost.masked_fill(~takes_part, torch.inf)


def _scale_logits(logits: Tensor, sampler: SamplerConfig) -> Tensor:
    if not bool(torch.isfinite(logits).all()):
        raise ModelError("a logit is no finite number; the weights are damaged or training had diverged")
    return logits.double() / sampler.divisor


def _race_scores(scaled: Tensor, keys: Tensor, sampler: SamplerConfig) -> Tensor:
    if sampler.temperature == 0.0:
        return scaled.clone()
    return gumbel_noise(keys, scaled.shape[-1]).add_(scaled)


def _token_logprobs(scaled: Tensor, tokens: Tensor) -> Tensor:
    return scaled.gather(1, tokens[:, None])[:, 0] - scaled.logsumexp(dim=-1)


def _allowed_tokens(scaled: Tensor, sampler: SamplerConfig, slack: float) -> Tensor:
    """Tokens that take part, ``[rows, vocab]``: more than the rule says with positive slack, fewer with negative.

    All tokens with the logit of the last one that is let in are let in.
    """
    cut = torch.full_like(scaled[:, :1], -torch.inf)
    if 0 < sampler.top_k < scaled.shape[-1]:
        cut = scaled.topk(sampler.top_k, dim=-1).values[:, -1:]
    if sampler.top_p < 1.0:
        share = min(1.0, max(0.0, sampler.top_p + 2 * slack))
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
    bits = (bits ^ _shift_bits(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_bits(bits, 27)) * _MIX_2
    return bits ^ _shift_bits(bits, 31)


def _shift_bits(bits: Tensor, by: int) -> Tensor:
    # a shift of signed numbers repeats the sign
    shifted: Tensor = (bits >> by) & (2 ** (64 - by) - 1)
    return shifted
