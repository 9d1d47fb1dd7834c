"""The loss of a text token by token, and the guess of each layer: the logit lens, with attention beside it.

Source: nostalgebraist 2020 (logit lens): the model's own final norm and head on the hidden state of each layer.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import DataError, ModelError
from phalanx.serve import TextModel

MAX_TOKENS = 4096
"""Longest text that is looked at; a longer one is refused, not cut."""


@dataclass(frozen=True)
class TokenLoss:
    """One token of a text.

    Attributes:
        text: Its own characters; pieces that a token has of a character are shown as U+FFFD.
        loss: Nats, from the tokens before it in its window; None of the first one, which nothing predicts.
        rank: Number of tokens that the model held likelier; None of the first one.
        likeliest: The token that it held likeliest.
    """

    text: str
    loss: float | None
    rank: int | None
    likeliest: str

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return asdict(self)


@dataclass(frozen=True)
class LayerGuess:
    """The guess of one layer about the next token after a prompt.

    Attributes:
        layer: 0 is the embedding; the last one is the model itself.
        tokens: The likeliest next tokens with their probabilities, the likeliest first.
        divergence: Kullback-Leibler divergence of the model's own distribution from this one, nats.
        attention: Weight of each token of the prompt for the last one, mean over heads; empty for layer 0.
    """

    layer: int
    tokens: tuple[tuple[str, float], ...]
    divergence: float
    attention: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return asdict(self)


@torch.no_grad()
def token_losses(model: TextModel, text: str) -> list[TokenLoss]:
    """Return every token of a text with its loss; windows that overlap by half, where it is longer than the model's.

    Raises:
        DataError: The text has fewer than two tokens, or too many.
    """
    ids = encode_text(model, text)
    window = min(model.context_length, len(ids))
    stride = max(1, window // 2)
    rows: list[TokenLoss] = [TokenLoss(token_text(model, ids[0]), None, None, "")]
    start = 0
    while len(rows) < len(ids):
        part = ids[start : start + window]
        logits = model.module(input_ids=torch.tensor([part])).logits[0].float()
        _check_finite(logits)
        scores = logits.log_softmax(dim=-1)
        for place in range(len(rows) - start, len(part)):
            row, token = scores[place - 1], part[place]
            rank = int((row > row[token]).sum())
            loss = -float(row[token])
            rows.append(TokenLoss(token_text(model, token), loss, rank, token_text(model, int(row.argmax()))))
        start += stride
    return rows


@torch.no_grad()
def layer_guesses(model: TextModel, prompt: str, num_tokens: int = 5) -> list[LayerGuess]:
    """Return the next token that each layer would guess, and the attention of the last one.

    Raises:
        DataError: The prompt has no token, or is longer than the model's window.
        ModelError: The model shows no hidden states or no attention, or a logit is no number.
    """
    ids = encode_text(model, prompt, min_tokens=1)
    if len(ids) > model.context_length:
        raise DataError(f"prompt: has {len(ids)} tokens, the model's window {model.context_length}; give a shorter one")
    module = model.module
    head = module.get_output_embeddings()
    if head is None:
        raise ModelError("the model has no head that could read a layer; phalanx interpret layers needs a decoder")
    with _eager_attention(module), _last_leaf(module.base_model) as norms:
        output = module(input_ids=torch.tensor([ids]), output_hidden_states=True, output_attentions=True)
    final = output.logits[0, -1].float()
    _check_finite(final)
    last_scores = final.log_softmax(dim=-1)
    states, attentions = output.hidden_states, output.attentions
    if states is None or attentions is None or any(part is None for part in attentions):
        raise ModelError("the model shows no hidden states or no attention; its code leaves them out")
    norm = norms[-1] if norms else None
    guesses = []
    for layer, state in enumerate(states):
        is_last = layer == len(states) - 1
        logits = final if is_last else head(state[0, -1:] if norm is None else norm(state[0, -1:]))[0].float()
        scores = logits.log_softmax(dim=-1)
        best = scores.topk(min(num_tokens, scores.numel()))
        tokens = tuple((token_text(model, int(token)), math.exp(score)) for score, token in zip(*best, strict=True))
        divergence = float((last_scores.exp() * (last_scores - scores)).sum())
        seen = attentions[layer - 1][0, :, -1].mean(dim=0).tolist() if layer else ()
        guesses.append(LayerGuess(layer, tokens, max(0.0, divergence), tuple(seen)))
    return guesses


def encode_text(model: TextModel, text: str, min_tokens: int = 2) -> list[int]:
    """Return the tokens of a text, with no special ones around it."""
    ids = list(model.tokenizer(text, add_special_tokens=False).input_ids)
    if not min_tokens <= len(ids) <= MAX_TOKENS:
        raise DataError(f"text: has {len(ids)} tokens, expected {min_tokens} to {MAX_TOKENS}; give another part of it")
    return ids


def token_text(model: TextModel, token: int) -> str:
    """Return the characters of one token."""
    return str(model.tokenizer.decode([token], clean_up_tokenization_spaces=False))


def _check_finite(logits: Tensor) -> None:
    if not bool(torch.isfinite(logits).all()):
        raise ModelError("a logit is no finite number; the weights are damaged or training had diverged")


@contextmanager
def _eager_attention(module: Any) -> Iterator[None]:
    """Within it attention is computed by the kernel that shows its weights."""
    before = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        yield
    finally:
        module.set_attn_implementation(before)


@contextmanager
def _last_leaf(trunk: nn.Module) -> Iterator[list[nn.Module]]:
    """Within it, a list ends with the norm of the trunk that was called last: behind it there is the head alone."""
    called: list[nn.Module] = []
    hooks = [
        part.register_forward_hook(lambda one, _inputs, _output: called.append(one))
        for part in trunk.modules()
        if not list(part.children()) and "norm" in type(part).__name__.casefold()
    ]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()
