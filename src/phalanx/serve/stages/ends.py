"""The owner's part of a served model: embedding, first and last layers and head, as transformers' whole model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig

from phalanx.errors import ModelError
from phalanx.models import ModelSource, StageSpec, build_stage, tie_head
from phalanx.models.hub_files import GENERATION
from phalanx.models.quiet import quiet_transformers
from phalanx.models.stage import AbsentPart
from phalanx.serve.engine.attention import Segment, segments_of_step
from phalanx.serve.stages.blocks import PassThrough, share_config

RunStages = Callable[[list[Segment], Tensor], Tensor]
"""Function from tokens of texts and their hidden states ``[tokens, dim]`` to the stages' output."""


class RemoteLayers(nn.Module):
    """Stands in the place of the first layer that is elsewhere, and asks the stages.

    Attributes:
        run_stages: Asks them; None while the model is being opened, where it returns its input.
    """

    def __init__(self) -> None:
        super().__init__()
        self.run_stages: RunStages | None = None

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        """Run the tokens of the step's texts; rows of padding stay as they are."""
        segments = list(segments_of_step())
        if self.run_stages is None or not segments:
            return hidden_states
        rows = torch.cat([torch.arange(part.row, part.row + part.length) for part in segments])
        output = hidden_states.clone()
        output[0, rows] = self.run_stages(segments, hidden_states[0, rows].contiguous())
        return output


def load_ends(directory: Path, source: ModelSource, front_layers: int, back_layers: int) -> tuple[Any, RemoteLayers]:
    """Load the owner's layers in float32, and no others.

    Returns:
        A causal model of transformers, and the part of it that asks the stages.

    Raises:
        ModelError: A tensor is missing, or no layer is left for the stages.
        OSError: transformers cannot read the directory.
    """
    num_layers = source.num_layers
    if front_layers + back_layers >= num_layers:
        raise ModelError(
            f"{directory}: has {num_layers} layers; front_layers and back_layers, {front_layers} and {back_layers}, "
            "leave none for stages"
        )
    options: Any = {"adapter": None, "activation_checkpointing": False, "attention": "sdpa", "seed": 0}
    front = build_stage(source, StageSpec(0, 3, 0, front_layers), **options)
    back = build_stage(source, StageSpec(2, 3, num_layers - back_layers, num_layers), **options)
    if source.family.ties_head(source.hub_config):
        tie_head(front, back)
    with quiet_transformers(), torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(source.hub_config)
    if (directory / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    _graft_parts(model, front, back)
    remote = RemoteLayers()
    model.get_submodule(source.family.trunk).get_submodule(source.family.blocks)[front_layers] = remote
    lacking = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if value.is_meta]
    if lacking:
        raise ModelError(f"{directory}: {lacking[0]} is in no part of the model; serve it in one process")
    share_config(model, model.config)
    return model.eval().requires_grad_(requires_grad=False), remote


def _graft_parts(model: nn.Module, front: nn.Module, back: nn.Module) -> None:
    """Put the parts of both ends into a model without memory; layers that neither has let everything pass."""
    for name, child in list(model.named_children()):
        parts = [part for part in (front.get_submodule(name), back.get_submodule(name)) if not _is_absent(part)]
        complete = [part for part in parts if not any(map(_is_absent, part.modules()))]
        if not parts:
            model.add_module(name, PassThrough())
        elif complete:
            model.add_module(name, complete[0])
        else:
            _graft_parts(child, front.get_submodule(name), back.get_submodule(name))


def _is_absent(part: nn.Module) -> bool:
    return isinstance(part, AbsentPart)
