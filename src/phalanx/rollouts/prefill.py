"""Sampled texts read again: a checker's own figures about them before anything is judged."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.models.token_draw import check_draws
from phalanx.rollouts.draw import DrawPlace
from phalanx.rollouts.generate import batches_of, step_through
from phalanx.rollouts.policy import PolicyModel, ReadTexts
from phalanx.rollouts.request import RolloutRequest
from phalanx.rollouts.rollout import Rollout
from phalanx.rollouts.sketch import sketch_distances, sketch_states

MAX_NUMBERS = 1 << 25
"""Logits in memory at a time."""


@dataclass(frozen=True)
class RereadRollout:
    """A checker's reading of one text with its own weights.

    Attributes:
        margins: Logits by which each token lost its draw, float64 ``[tokens]``.
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
    """Read texts again, prompts and all: in one pass, or with a cache where one pass computes something else.

    Args:
        model: Has the weights that the request names.
        rollouts: Texts that fit the request, as `describe_misfit` checks.
        tolerance: Logits by which honest computations may differ.

    Returns:
        In the order of `rollouts`.
    """
    reread: dict[int, RereadRollout] = {}
    groups: dict[tuple[int, bool], list[int]] = {}
    for n, rollout in enumerate(rollouts):
        groups.setdefault((len(rollout.prompt_ids), _is_read_in_one_pass(model, rollout)), []).append(n)
    for numbers in groups.values():
        numbers.sort(key=lambda n: len(rollouts[n].ids))
        while numbers:
            longest = len(rollouts[numbers[-1]].ids)
            rows = max(1, MAX_NUMBERS // (longest * model.vocab_size))
            batch, numbers[:] = numbers[-rows:], numbers[:-rows]
            texts = [rollouts[n] for n in batch]
            for n, reading in zip(batch, read_texts(model, texts), strict=True):
                reread[n] = compare_text(request, rollouts[n], reading, tolerance)
    return tuple(reread[n] for n in range(len(rollouts)))


def rewrite_rollouts(
    model: PolicyModel, request: RolloutRequest, rollouts: Sequence[Rollout], number: int, batch_rows: int
) -> ReadTexts:
    """Compute one text of an answer again as an honest writer does: in its batch, token by token, with a cache.

    Args:
        model: Has the weights that the request names.
        rollouts: All texts of the answer, in the order of `RolloutRequest.text_places`.

    Returns:
        What precedes each token of that text, ``[tokens, ...]``.
    """
    by_place = {(rollout.prompt, rollout.sample): rollout for rollout in rollouts}
    chosen = rollouts[number]
    (batch,) = [
        prompts for prompts in batches_of(request, batch_rows) if chosen.prompt in {prompt.number for prompt in prompts}
    ]
    places = [(prompt.number, sample) for prompt in batch for sample in range(request.samples)]
    row = places.index((chosen.prompt, chosen.sample))
    return _read_stepwise(model, [prompt.ids for prompt in batch], [by_place[place] for place in places], {row})[0]


def _is_read_in_one_pass(model: PolicyModel, one: Rollout) -> bool:
    """Whether one pass over a text computes what its writer's cache did, up to rounding."""
    prompt = len(one.prompt_ids)
    return model.reads_alike(prompt, prompt + len(one.ids) - 1)


def read_texts(model: PolicyModel, texts: Sequence[Rollout]) -> list[ReadTexts]:
    """Read texts to prompts of one length again, all in one pass or all with a cache.

    Returns:
        What precedes each token of each text, ``[tokens, ...]``.
    """
    if not all(_is_read_in_one_pass(model, text) for text in texts):
        return _read_stepwise(model, [text.prompt_ids for text in texts], texts, set(range(len(texts))))
    longest = max(len(text.ids) for text in texts)
    # what follows the last token is not looked at; in a causal model, padding behind a text changes nothing in it
    rows = [[*text.prompt_ids, *text.ids[:-1], *[0] * (longest - len(text.ids))] for text in texts]
    read = model.read_whole_texts(torch.tensor(rows), longest)
    return [
        ReadTexts(logits[: len(text.ids)], states[: len(text.ids)])
        for text, logits, states in zip(texts, read.logits, read.states, strict=True)
    ]


def _read_stepwise(
    model: PolicyModel, prompts: Sequence[Sequence[int]], texts: Sequence[Rollout], wanted: set[int]
) -> list[ReadTexts]:
    """Read texts token by token, one behind the other for each prompt; return the state before wanted tokens."""
    logits: dict[int, list[Tensor]] = {row: [] for row in sorted(wanted)}
    states: dict[int, list[Tensor]] = {row: [] for row in sorted(wanted)}
    position = 0

    def choose(rows: Sequence[int], read: ReadTexts) -> tuple[Tensor, Sequence[int]]:
        nonlocal position
        for n, row in enumerate(rows):
            if row in wanted:
                logits[row].append(read.logits[n, 0])
                states[row].append(read.states[n, 0])
        tokens = torch.tensor([texts[row].ids[position] for row in rows])
        position += 1
        return tokens, [n for n, row in enumerate(rows) if position < len(texts[row].ids)]

    step_through(model, torch.tensor([list(ids) for ids in prompts]), len(texts) // len(prompts), choose)
    return [ReadTexts(torch.stack(logits[row]), torch.stack(states[row])) for row in logits]


def compare_text(request: RolloutRequest, one: Rollout, read: ReadTexts, tolerance: float) -> RereadRollout:
    """Compare the claims of a text with its reading, ``[tokens, ...]``."""
    place = DrawPlace(request.seed, request.step, one.prompt, one.sample)
    keys = torch.tensor([place.draw_key(position) for position in range(len(one.ids))])
    draws = check_draws(read.logits.cpu(), keys, torch.tensor(one.ids), request.sampler, tolerance)
    sketches = sketch_states(read.states)[:: request.sampler.sketch_every]
    return RereadRollout(
        margins=draws.margins.numpy(),
        differs=draws.differs.numpy(),
        logprob_gaps=np.abs(one.logprobs.astype(np.float64) - draws.logprobs.numpy()),
        sketch_gaps=sketch_distances(one.sketches, sketches),
    )
