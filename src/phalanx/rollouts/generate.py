"""Texts by the seeded draw, with a KV cache; prompts of one length share a batch, so that nothing is padded."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.errors import DataError
from phalanx.models.token_draw import draw_tokens
from phalanx.rollouts.config import BATCH_ROWS
from phalanx.rollouts.draw import DrawPlace
from phalanx.rollouts.policy import PolicyModel, ReadTexts
from phalanx.rollouts.request import Prompt, RolloutRequest
from phalanx.rollouts.rollout import SKETCH_NUMBERS, Rollout
from phalanx.rollouts.sketch import sketch_states


@dataclass
class _WrittenText:
    """One text while it is written."""

    prompt: Prompt
    sample: int
    place: DrawPlace
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sketches: list[NDArray[np.float32]] = field(default_factory=list)
    is_over: bool = False


def generate_rollouts(model: PolicyModel, request: RolloutRequest, batch_rows: int = BATCH_ROWS) -> tuple[Rollout, ...]:
    """Write every text of a request.

    Args:
        model: Has the weights that the request names; that is the caller's to see to.
        batch_rows: About so many texts at a time; where bits count, it belongs to the numeric class.

    Returns:
        In the order of `RolloutRequest.text_places`. Equal bits for equal weights, request, batch and numeric class.
    """
    check_room(model, request)
    by_place = {
        (rollout.prompt, rollout.sample): rollout
        for batch in batches_of(request, batch_rows)
        for rollout in _write_batch(model, request, batch)
    }
    return tuple(by_place[place] for place in request.text_places)


def check_room(model: PolicyModel, request: RolloutRequest) -> None:
    """Return where every prompt fits into the model."""
    for prompt in request.prompts:
        if len(prompt.ids) + request.sampler.max_new_tokens > model.context_length:
            raise DataError(
                f"prompt {prompt.number}: has {len(prompt.ids)} tokens, with {request.sampler.max_new_tokens} new ones "
                f"more than the model's window of {model.context_length}; shorten it, or lower max_new_tokens"
            )
        if max(prompt.ids) >= model.vocab_size:
            raise DataError(f"prompt {prompt.number}: has a token beyond the vocabulary of {model.vocab_size}")


def batches_of(request: RolloutRequest, batch_rows: int) -> Iterator[Sequence[Prompt]]:
    """Prompts of one length, in the order of the request, as a writer puts them together."""
    by_length: dict[int, list[Prompt]] = defaultdict(list)
    for prompt in request.prompts:
        by_length[len(prompt.ids)].append(prompt)
    max_prompts = max(1, batch_rows // request.samples)
    for prompts in by_length.values():
        for start in range(0, len(prompts), max_prompts):
            yield prompts[start : start + max_prompts]


ChooseTokens = Callable[[Sequence[int], ReadTexts], tuple[Tensor, Sequence[int]]]
"""Gets the numbers of the rows that are read and what follows them; returns the next token of each of these rows, int64
``[rows]``, and the places among them of those that go on."""


def step_through(model: PolicyModel, prompts: Tensor, samples: int, choose: ChooseTokens) -> None:
    """Read rows token by token with a cache, until none goes on: the one way in which texts come about.

    Args:
        prompts: int64 ``[prompts, tokens]``.
        samples: Rows of each prompt, one behind the other.
        choose: Chooses the next token of each row.
    """
    read, cache = model.read_prompts(prompts)
    if samples > 1:
        cache.batch_repeat_interleave(samples)
        read = ReadTexts(read.logits.repeat_interleave(samples, dim=0), read.states.repeat_interleave(samples, dim=0))
    rows = list(range(len(prompts) * samples))
    while True:
        tokens, going_on = choose(rows, read)
        if not going_on:
            return
        if len(going_on) < len(rows):
            places = torch.tensor(going_on)
            cache.batch_select_indices(places.to(read.logits.device))
            rows, tokens = [rows[n] for n in going_on], tokens[places]
        read = model.read_next_tokens(tokens, cache)


def _write_batch(model: PolicyModel, request: RolloutRequest, prompts: Sequence[Prompt]) -> list[Rollout]:
    texts = [
        _WrittenText(prompt, sample, DrawPlace(request.seed, request.step, prompt.number, sample))
        for prompt in prompts
        for sample in range(request.samples)
    ]

    def choose(rows: Sequence[int], read: ReadTexts) -> tuple[Tensor, Sequence[int]]:
        tokens = _draw_next(request, [texts[row] for row in rows], read)
        return tokens, [n for n, row in enumerate(rows) if not texts[row].is_over]

    step_through(model, torch.tensor([prompt.ids for prompt in prompts]), request.samples, choose)
    return [_finish_rollout(request, text) for text in texts]


def _draw_next(request: RolloutRequest, rows: Sequence[_WrittenText], read: ReadTexts) -> Tensor:
    """Draw the next token of every row, and commit to it; int64 ``[rows]``."""
    position = len(rows[0].ids)
    keys = torch.tensor([text.place.draw_key(position) for text in rows])
    tokens, logprobs = draw_tokens(read.logits[:, 0].cpu(), keys, request.sampler)
    if position % request.sampler.sketch_every == 0:
        for text, sketch in zip(rows, sketch_states(read.states[:, 0]), strict=True):
            text.sketches.append(sketch)
    for text, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
        text.ids.append(token)
        text.logprobs.append(logprob)
        text.is_over = token in request.ends or len(text.ids) == request.sampler.max_new_tokens
    return tokens


def _finish_rollout(request: RolloutRequest, text: _WrittenText) -> Rollout:
    return Rollout(
        prompt=text.prompt.number,
        sample=text.sample,
        prompt_ids=text.prompt.ids,
        ids=tuple(text.ids),
        finish="stop" if text.ids[-1] in request.ends else "length",
        logprobs=np.asarray(text.logprobs, np.float32),
        sketches=np.asarray(text.sketches, np.float32).reshape(-1, SKETCH_NUMBERS),
    )
