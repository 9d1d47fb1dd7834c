"""A small language model that is trained with and without privacy, by the code of a private run's step."""

import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from phalanx.parallel.privacy.row_gradients import RowGradients
from phalanx.security.privacy import (
    PoissonGaussian,
    PrivacyConfig,
    SecureStream,
    gaussian_noise,
    min_noise_multiplier,
    poisson_sample,
)

VOCABULARY, LENGTH = 64, 12


@dataclass(frozen=True)
class TrainedWorld:
    """A model after its training.

    Attributes:
        epsilon: That the accountant quotes; None without privacy.
    """

    losses: Tensor
    epsilon: float | None


class TokenModel(nn.Module):
    """A Llama of two small layers, from ids to logits."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, use_cache=False, **sizes)
        self.inner = LlamaForCausalLM(config)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits."""
        places = torch.arange(ids.shape[1]).expand(len(ids), -1).contiguous()
        logits: Tensor = self.inner(input_ids=ids, position_ids=places).logits
        return logits


def row_losses(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean loss of each row's next tokens."""
    logits = model(ids[:, :-1].contiguous())
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses.view(len(ids), -1).mean(1)


def train_rows(
    rows: Tensor,
    asked: Tensor,
    *,
    budget: tuple[float, float] | None,
    steps: int,
    seed: int,
    batch: int | None = None,
) -> TrainedWorld:
    """Train on some rows, and return the losses of others.

    Args:
        rows: ``[rows, LENGTH]``.
        budget: Epsilon and delta; None for no clipping and no noise.
        batch: Rows of a step in the mean; half of them when left out.
    """
    torch.manual_seed(seed)
    model, batch = TokenModel(), batch or len(rows) // 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rate, key = batch / len(rows), os.urandom(32)
    noise = 0.0 if budget is None else min_noise_multiplier(*budget, rate, steps)
    epsilon, delta = budget or (1.0, 1e-5)
    settings = PrivacyConfig(epsilon=epsilon, delta=delta, clip_norm=1.0, clipping="hooks")
    gradients = None if budget is None else RowGradients(model, settings)
    for step in range(steps):
        drawn = rows[torch.from_numpy(poisson_sample(key, step, len(rows), batch))]
        if gradients is None:
            optimizer.zero_grad()
            torch.autograd.backward(row_losses(model, drawn).sum() / batch)
        else:
            _take_private_step(model, gradients, drawn, noise, batch)
        optimizer.step()
    with torch.no_grad():
        losses = row_losses(model.eval(), asked)
    spent = None if budget is None else PoissonGaussian(noise, rate).epsilon_after(steps, delta)
    return TrainedWorld(losses, spent)


def _take_private_step(model: nn.Module, gradients: RowGradients, drawn: Tensor, noise: float, batch: int) -> None:
    total, stream = gradients.zero_total(), SecureStream(os.urandom(32))
    if len(drawn):
        gradients.add_rows(lambda numbers: row_losses(model, drawn[numbers]), torch.arange(len(drawn)), total)
    for gradient in total:
        gradient.add_(torch.from_numpy(gaussian_noise(stream, gradient.numel(), noise)).view_as(gradient)).div_(batch)
    gradients.set_gradients(total)
