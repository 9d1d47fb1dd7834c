"""Sampled texts read again in one pass: what a checker knows of them before anything is judged."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.rollouts.draw import DrawPlace, check_draws
from phalanx.rollouts.policy import PolicyModel
from phalanx.rollouts.request import RolloutRequest
from phalanx.rollouts.rollout import Rollout
from phalanx.rollouts.sketch import sketch_distances, sketch_states

MOST_NUMBERS = 1 << 25
"""Logits in memory at a time."""


@dataclass(frozen=True)
class RereadRollout:
    """What a checker's weights say of one text.

    Attributes:
        margins: By how many logits each token lost its draw, float64 ``[tokens]``.
        differs: Whether another token won by the checker's logits, ``[tokens]``.
        logprob_gaps: Distance of each claimed log-probability, float64 ``[tokens]``.
        sketch_gaps: Relative distance of each claimed sketch, float64 ``[num_sketches]``.
    """

    margins: NDArray[np.float64]
    differs: NDArray[np.bool_]
    logprob_gaps: NDArray[np.float64]
    sketch_gaps: NDArray[np.float64]


def reread_rollouts(
    model: PolicyModel, request: RolloutRequest, rollouts: Sequence[Rollout], tolerance: float
) -> tuple[RereadRollout, ...]:
    """Read texts again, prompts and all, each in one pass without a cache.

    Args:
        model: Has the weights that the request names.
        request: What was asked for.
        rollouts: Texts that fit the request, as `misfit` finds.
        tolerance: By how many logits honest computations may differ.

    Returns:
        In the order of `rollouts`.

    Raises:
        ModelError: A logit of these weights is no finite number: a fault on this side.
    """
    found: dict[int, RereadRollout] = {}
    by_length: dict[int, list[int]] = {}
    for n, one in enumerate(rollouts):
        by_length.setdefault(len(one.prompt_ids), []).append(n)
    for numbers in by_length.values():
        numbers.sort(key=lambda n: len(rollouts[n].ids))
        while numbers:
            longest = len(rollouts[numbers[-1]].ids)
            rows = max(1, MOST_NUMBERS // (longest * model.vocab_size))
            batch, numbers[:] = numbers[-rows:], numbers[:-rows]
            found |= zip(batch, _reread(model, request, [rollouts[n] for n in batch], tolerance), strict=True)
    return tuple(found[n] for n in range(len(rollouts)))


def _reread(
    model: PolicyModel, request: RolloutRequest, rollouts: Sequence[Rollout], tolerance: float
) -> list[RereadRollout]:
    longest = max(len(one.ids) for one in rollouts)
    # what follows the last token is not looked at; in a causal model, padding behind a text changes nothing in it
    texts = [[*one.prompt_ids, *one.ids[:-1], *[0] * (longest - len(one.ids))] for one in rollouts]
    read = model.read(torch.tensor(texts), longest)
    return [
        _compare(request, one, logits[: len(one.ids)].cpu(), sketch_states(states[: len(one.ids)]), tolerance)
        for one, logits, states in zip(rollouts, read.logits, read.states, strict=True)
    ]


def _compare(
    request: RolloutRequest, one: Rollout, logits: torch.Tensor, sketches: NDArray[np.float32], tolerance: float
) -> RereadRollout:
    place = DrawPlace(request.seed, request.step, one.prompt, one.sample)
    keys = torch.tensor([place.key(position) for position in range(len(one.ids))])
    draws = check_draws(logits, keys, torch.tensor(one.ids), request.sampler, tolerance)
    return RereadRollout(
        margins=draws.margins.numpy(),
        differs=draws.differs.numpy(),
        logprob_gaps=np.abs(one.logprobs.astype(np.float64) - draws.logprobs.numpy()),
        sketch_gaps=sketch_distances(one.sketches, sketches[:: request.sampler.sketch_every]),
    )
