"""The blocks of one stage, run over pieces of several texts, each with keys and values of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from phalanx.errors import FrameError, ModelError
from phalanx.models import (
    ModelSource,
    StageModule,
    StageSpec,
    build_empty_stage,
    build_stage,
    shared_hub_config,
    trained_shapes,
)
from phalanx.models.stage import AbsentPart
from phalanx.serve.engine.attention import NAME, Segment, attend_rows, run_trunk
from phalanx.serve.engine.row_cache import RowCache

MIN_ROWS = 4
"""From so many rows on, a row's products have the same bits whatever the number of rows (ADR 240)."""


class PassThrough(nn.Module):
    """A placeholder of a block that is elsewhere; it returns its input."""

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        """Return the input."""
        return hidden_states


@dataclass(eq=False)
class HeldText:
    """Keys and values of one text at this stage."""

    cache: RowCache
    length: int = 0


class StageBlocks:
    """The middle layers of a model in float32.

    Raises:
        ModelError: Something outside of its blocks changes hidden states, or a router chooses experts, so that rounding
            could choose others.
    """

    def __init__(self, stage: StageModule) -> None:
        facts = stage.family.facts
        if facts.experts is not None:
            raise ModelError(
                f"{stage.family.model_type}: routers choose experts, and rounding can change their choice; serve it in "
                "one process"
            )
        if facts.predicts != "next":
            raise ModelError(f"{stage.family.model_type}: is no decoder; stages serve decoders alone")
        self.width = int(stage.hub_config.hidden_size)
        self.num_layers = int(stage.family.num_layers(stage.hub_config))
        self._stage = stage.eval().requires_grad_(requires_grad=False)
        self._trunk = stage.trunk
        _pass_absent_parts(self._trunk)
        AttentionInterface.register(NAME, attend_rows)
        stage.hub_config._attn_implementation = NAME
        share_config(stage, stage.hub_config)
        self._check_pass()

    @classmethod
    def build(cls, config: Mapping[str, Any], layers: tuple[int, int], weights: Mapping[str, Tensor]) -> Self:
        """Build a stage from data that came from elsewhere.

        Args:
            config: Keys of the hub's config.json of the whole model.
            layers: First layer, and the one behind the last.
        """
        spec = StageSpec(1, 3, *layers)
        # compared before there is memory for what the config claims
        if trained_shapes(shared_hub_config(config), None, spec) != {k: tuple(v.shape) for k, v in weights.items()}:
            raise ModelError(f"layers {layers[0]} to {layers[1]}: the weights are not those of the config")
        stage = build_empty_stage(config, spec, adapter=None, activation_checkpointing=False, attention="sdpa")
        for name, parameter in stage.all_parameters().items():
            parameter.detach().copy_(weights[name])
        return cls(stage)

    @classmethod
    def read(cls, source: ModelSource, layers: tuple[int, int]) -> Self:
        """Read a stage from the files of a model, and nothing else of them.

        Raises:
            ModelError: A tensor is missing, or the family cannot be cut here.
        """
        spec = StageSpec(1, 3, *layers)
        options: Any = {"adapter": None, "activation_checkpointing": False, "attention": "sdpa", "seed": 0}
        return cls(build_stage(source, spec, **options))

    @property
    def weights(self) -> dict[str, Tensor]:
        """Its parameters by the hub's names; shared, not copied."""
        return {name: parameter.detach() for name, parameter in self._stage.all_parameters().items()}

    def open_text(self) -> HeldText:
        """Return an empty cache."""
        return HeldText(RowCache(self.num_layers))

    @torch.inference_mode()
    def extend(self, pieces: Sequence[tuple[HeldText, int]], hidden: Tensor) -> Tensor:
        """Run pieces of texts.

        Args:
            pieces: A text and the number of its next tokens, in the order of the rows.
            hidden: float32 ``[tokens, dim]``.

        Returns:
            Hidden states of the same tokens; memory of their own.
        """
        segments: list[Segment] = []
        positions: list[int] = []
        ends = {text: text.length for text, _ in pieces}
        for text, length in pieces:
            segments.append(Segment(text.cache, len(positions), ends[text], length))
            positions.extend(range(ends[text], ends[text] + length))
            ends[text] += length
        for text, stop in ends.items():
            text.cache.reserve_room(stop)
        missing = max(0, MIN_ROWS - len(positions))
        rows = torch.cat([hidden, hidden.new_zeros(missing, hidden.shape[1])]) if missing else hidden
        output = run_trunk(self._trunk, rows[None], torch.tensor([positions + [0] * missing]), segments)
        for text, stop in ends.items():
            text.length = text.cache.length = stop
        return output[: len(positions)].contiguous().clone()

    @torch.inference_mode()
    def _check_pass(self) -> None:
        """Compare a trunk without any blocks with doing nothing."""
        blocks = self._trunk.get_submodule(self._stage.family.blocks)
        stage_blocks = list(blocks)
        probe = torch.randn(MIN_ROWS, self.width, generator=torch.Generator().manual_seed(0))
        for place in range(len(stage_blocks)):
            blocks[place] = PassThrough()
        try:
            output = run_trunk(self._trunk, probe[None], torch.arange(MIN_ROWS)[None], [])
        except (TypeError, ValueError, AttributeError, RuntimeError) as exc:
            raise ModelError(f"{self._stage.family.model_type}: its layers cannot be run apart ({exc})") from exc
        for place, block in enumerate(stage_blocks):
            blocks[place] = block
        if not torch.equal(output, probe):
            raise ModelError(
                f"{self._stage.family.model_type}: changes hidden states outside of its layers, so that stages would "
                "do it again; serve it in one process"
            )


def share_config(model: nn.Module, hub_config: Any) -> None:
    """Give every part of a model the same config object."""
    for module in model.modules():
        if "config" in vars(module):
            module.config = hub_config


def cut_pieces(states: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Return the pieces that lie behind one another in ``[tokens, dim]``."""
    if sum(lengths) != len(states):
        raise FrameError(f"found {len(states)} tokens, expected {sum(lengths)}")
    return list(torch.split(states, list(lengths)))


def _pass_absent_parts(trunk: nn.Module) -> None:
    """Let layers and norms that are elsewhere return their input."""
    for module in list(trunk.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, AbsentPart):
                module.add_module(name, PassThrough())
