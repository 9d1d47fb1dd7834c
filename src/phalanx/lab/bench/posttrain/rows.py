"""Rows for both sides of the bench: conversations, or pairs of answers to one prompt, of tokens drawn by a seed."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from phalanx.config import StrictModel
from phalanx.data.preferences.pairs import PairRows
from phalanx.models import ModelConfig, ModelSource, open_model
from phalanx.objectives import IGNORE
from phalanx.train.batches.reference import ReferenceModel, log_probs_of

PADDING = 1
_FIRST_WORD = 2
_SEED = 5


class PosttrainPlan(StrictModel):
    """The sizes of the bench.

    Attributes:
        layers: Blocks of the model, a llama from scratch.
        width: Numbers a token has between blocks, a multiple of 32.
        length: Tokens of the longest row of each step; others have between half of it and all.
        turns: Measured ones of each arm; one more warms up.
    """

    layers: int = 4
    width: int = 256
    vocab_size: int = 4096
    batch_size: int = 8
    length: int = 128
    steps: int = 4
    turns: int = 6

    @property
    def total_steps(self) -> int:
        """Steps of an arm."""
        return self.steps * (self.turns + 1)

    def open_plan_model(self, cache: Path, *, smallest: bool = False) -> ModelSource:
        """The model that is trained, or one that rehearses its training in little memory."""
        layers, width = (1, 32) if smallest else (self.layers, self.width)
        architecture: dict[str, str | int | float | bool | None] = {
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": width // 32,
            "num_key_value_heads": width // 32,
            "max_position_embeddings": self.length,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        return open_model(ModelConfig(from_scratch=True, architecture=architecture), cache, _SEED)


def write_rows(plan: PosttrainPlan, objective: str, source: ModelSource, path: Path) -> list[int]:
    """Write the rows of all steps with a reference model's log-probabilities, and return the tokens of each step.

    Args:
        objective: "sft", or "dpo": rows 2k and 2k + 1 then have one prompt.
        path: Path of a safetensors file: ``ids``, ``labels`` (shifted), ``prompts`` and ``lengths`` (tokens of each
            row).
    """
    num_rows, shape = plan.total_steps * plan.batch_size, (plan.total_steps * plan.batch_size, plan.length)
    draw = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(_FIRST_WORD, plan.vocab_size, shape, generator=draw)
    lengths = torch.randint(plan.length // 2, plan.length + 1, (num_rows,), generator=draw)
    lengths[:: plan.batch_size] = plan.length
    prompts = torch.randint(plan.length // 8, plan.length // 4, (num_rows,), generator=draw)
    if objective == "dpo":
        prompts[1::2] = prompts[0::2]
        shared = torch.arange(plan.length) < prompts[0::2, None]
        ids[1::2] = torch.where(shared, ids[0::2], ids[1::2])
    place = torch.arange(plan.length)
    ids[place >= lengths[:, None]] = PADDING
    following = torch.cat([ids[:, 1:], torch.full((num_rows, 1), PADDING)], 1)
    answers = (place + 1 >= prompts[:, None]) & (place + 1 < lengths[:, None])
    labels = following.masked_fill(~answers, IGNORE)
    rows: dict[str, Tensor] = {"ids": ids, "labels": labels, "prompts": prompts, "lengths": lengths}
    if objective == "dpo":
        rows["reference"] = log_probs_of(ReferenceModel(source, "sdpa", 0), PairRows(ids, labels, {}))
    save_file({name: tensor.contiguous() for name, tensor in rows.items()}, path)
    counts: list[int] = lengths.view(plan.total_steps, plan.batch_size).sum(1).tolist()
    return counts


def rows_of_step(rows: dict[str, Tensor], step: int, batch_size: int) -> dict[str, Any]:
    """Cut one step out of what `write_rows` wrote."""
    return {name: tensor[step * batch_size : (step + 1) * batch_size] for name, tensor in rows.items()}
