"""P-tuning: virtual tokens before the text, of which an encoder makes embeddings; encoder and tokens are trained."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import ModelError
from phalanx.models.config import PromptEncoderConfig
from phalanx.models.seeding import fill_normal, seeded_generator
from phalanx.models.stage import PROMPT, StageModule

PROMPT_TABLE = f"{PROMPT}.embedding.weight"
"""The canonical name of what stands for virtual tokens before the encoder; without one it is their embeddings."""

_LSTM_LAYERS = 2


class PromptEncoder(nn.Module):
    """A table of virtual tokens and the encoder that makes embeddings of them, as peft has it, on the meta device.

    Source: Liu et al. 2021 (P-tuning), with names and sizes of peft's ``PromptEncoder``.
    """

    def __init__(self, adapter: PromptEncoderConfig, size: int) -> None:
        super().__init__()
        inner = adapter.encoder_size or size
        with torch.device("meta"):
            self.embedding = nn.Embedding(adapter.tokens, size)
            self.lstm_head: nn.LSTM | None = None
            match adapter.encoder:
                case "none":
                    self.mlp_head: nn.Module = nn.Identity()
                case "mlp":
                    self.mlp_head = nn.Sequential(
                        *(nn.Linear(size, inner), nn.ReLU()),
                        *(nn.Linear(inner, inner), nn.ReLU()),
                        nn.Linear(inner, size),
                    )
                case "lstm":
                    self.lstm_head = nn.LSTM(size, inner, _LSTM_LAYERS, bidirectional=True, batch_first=True)
                    self.mlp_head = nn.Sequential(
                        nn.Linear(2 * inner, 2 * inner), nn.ReLU(), nn.Linear(2 * inner, size)
                    )

    def forward(self) -> Tensor:
        """Return the embeddings of the virtual tokens, ``[tokens, size]``."""
        embeddings: Tensor = self.embedding.weight
        if self.lstm_head is not None:
            embeddings = self.lstm_head(embeddings.unsqueeze(0))[0].squeeze(0)
        encoded: Tensor = self.mlp_head(embeddings)
        return encoded


def inject_prompt(stage: StageModule, adapter: PromptEncoderConfig) -> None:
    """Put virtual tokens before the text; the stage that embeds has them and their encoder. Freeze the rest.

    Raises:
        ModelError: The model reads a text and answers it, or sees all of it at once.
    """
    if stage.family.facts.predicts != "next":
        raise ModelError(
            f"{stage.family.model_type}: virtual tokens of a prompt encoder come before a text that is continued, and "
            "it continues none; take lora"
        )
    stage.requires_grad_(False)
    stage.num_prompt_tokens = adapter.tokens
    if not stage.spec.has_embedding:
        return
    encoder = PromptEncoder(adapter, int(stage.hub_config.hidden_size))
    stage.add_module(PROMPT, encoder)

    def lead(_: Any, given: tuple[Any, ...], embedded: Tensor) -> Tensor:
        prompt = encoder().to(embedded.dtype).expand(embedded.shape[0], -1, -1)
        return torch.cat([prompt, embedded[:, adapter.tokens :]], dim=1)

    table = stage.get_submodule(stage.family.embedding_weight.rpartition(".")[0])
    if int(getattr(table, "embedding_dim", 0)) != encoder.embedding.embedding_dim:
        raise ModelError(f"{stage.family.model_type}: its embeddings are projected; take lora")
    table.register_forward_hook(lead)


def is_prompt(name: str) -> bool:
    """True for the canonical name of a parameter of a prompt encoder."""
    return name.startswith(f"{PROMPT}.")


def draw_prompt(name: str, values: Tensor, seed: int) -> None:
    """Give a parameter its first values, which depend on seed and canonical name alone.

    The table is normal as peft's, matrices are uniform within one over the root of their inputs, biases are zero.
    """
    if values.ndim < 2:
        values.detach().zero_()
        return
    generator = seeded_generator(seed, name)
    if name == PROMPT_TABLE:
        fill_normal(values, 1.0, generator)
        return
    bound = 1.0 / math.sqrt(values.shape[1])
    drawn = torch.empty(values.shape, dtype=torch.float32, device="cpu")
    values.detach().copy_(drawn.uniform_(-bound, bound, generator=generator))


@torch.no_grad()
def encoded_prompt(trained: Mapping[str, Tensor], adapter: PromptEncoderConfig) -> Tensor:
    """Return the embeddings ``[tokens, size]`` that a trained encoder makes; they are all that a file of peft has."""
    prompt_tensors = {name.removeprefix(f"{PROMPT}."): value for name, value in trained.items() if is_prompt(name)}
    size = trained[PROMPT_TABLE].shape[1] if PROMPT_TABLE in trained else 1
    encoder = PromptEncoder(adapter, size)
    try:
        encoder.load_state_dict(prompt_tensors, assign=True)
    except RuntimeError as exc:
        raise ModelError(f"{PROMPT}: is not what was trained: {exc}") from exc
    embeddings: Tensor = encoder().detach().contiguous()
    return embeddings
