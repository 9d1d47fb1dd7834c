"""Answers of a model to many prompts, in batches of equal length: no answer depends on its neighbours' padding."""

from collections.abc import Mapping, Sequence

import torch

from phalanx.serve.text_model import TextModel

_ROWS = 256


@torch.no_grad()
def greedy_answers(model: TextModel, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[tuple[int, ...]]:
    """Return the likeliest continuation of each prompt, cut behind the end of the text."""
    return _generate(model, prompts, num_tokens, {"do_sample": False})


@torch.no_grad()
def sampled_texts(
    model: TextModel, prompts: Sequence[Sequence[int]], num_tokens: int, seed: int
) -> list[tuple[int, ...]]:
    """Return a text drawn at temperature 1 behind each prompt."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drawn = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        return _generate(model, prompts, num_tokens, drawn)


def _generate(
    model: TextModel, prompts: Sequence[Sequence[int]], num_tokens: int, drawn: Mapping[str, object]
) -> list[tuple[int, ...]]:
    lengths: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        lengths.setdefault(len(prompt), []).append(number)
    answers: list[tuple[int, ...]] = [()] * len(prompts)
    ends, room = model.end_tokens, model.context_length
    for length, numbers in lengths.items():
        for start in range(0, len(numbers), _ROWS):
            chosen = numbers[start : start + _ROWS]
            ids = torch.tensor([list(prompts[number]) for number in chosen], device=model.module.device)
            outputs = model.module.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max(1, min(num_tokens, room - length)),
                pad_token_id=min(ends, default=0),
                **drawn,
            )[:, length:].tolist()
            for number, output in zip(chosen, outputs, strict=True):
                stop = next((place for place, token in enumerate(output) if token in ends), len(output))
                answers[number] = tuple(output[:stop])
    return answers
