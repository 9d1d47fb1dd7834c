"""Tokens out of the gradients of the first block's adapter, for batches of several sizes and under each guard."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from phalanx.lab.reproduce.leaks.lab import Row, Texts
from phalanx.lab.reproduce.leaks.size import LeakSize
from phalanx.models import LoraConfig, ModelSource, StageModule, StageSpec, build_stage
from phalanx.redteam.inversion import WIRES, Guard, SpanCheck, layer_inputs, precision_and_recall

RANK = 16
_LR = 1.0


@dataclass(frozen=True)
class AdapterCell:
    """The parameters of a row: a batch of one sequence with so many tokens that have a next one."""

    tokens: int
    guard: Guard

    @property
    def adapter_label(self) -> str:
        """One line for the progress."""
        return f"gradient of {self.tokens} tokens, {self.guard}"


def adapter_cells(size: LeakSize) -> Iterator[AdapterCell]:
    """What is measured."""
    for guard in WIRES:
        for tokens in size.batches:
            yield AdapterCell(tokens, guard)


class AdapterLab:
    """A runner of cells; the model with its adapter is made at the first use.

    The adapter has been trained for one plain step on the host's own text: before its first step half of it is zero.
    """

    def __init__(self, source: ModelSource, texts: Texts) -> None:
        self._source, self._read = source, texts

    def __call__(self, cell: AdapterCell) -> Row:
        """Measure one cell."""
        ids = self._private_texts[1][:1, : cell.tokens + 1]
        loss = functional.cross_entropy(self._adapted_stage(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        a, b = torch.autograd.grad(loss, self._adapter_weights)
        gradients = a, b
        if cell.guard != "plaintext":
            # adapters cross in fp32, so plaintext is what it is
            wire = WIRES[cell.guard]()
            gradients = (wire.host_view(gradients[0]), wire.host_view(gradients[1]))
        (tokens,) = self._span_check.tokens_by_position(*gradients, self._adapter_weights[0].detach())
        precision, recall = precision_and_recall(tokens, ids[:, :-1])
        return {**asdict(cell), "rank": RANK, "found": tokens.numel(), "precision": precision, "recall": recall}

    @cached_property
    def _private_texts(self) -> tuple[Tensor, Tensor]:
        return self._read()

    @cached_property
    def _adapted_stage(self) -> StageModule:
        stage = build_stage(
            self._source,
            StageSpec(0, 1, 0, self._source.num_layers),
            adapter=LoraConfig(rank=RANK, targets=(self._layer_name,)),
            activation_checkpointing=False,
            attention="sdpa",
            seed=0,
        ).eval()
        ids = self._private_texts[0][:2]
        functional.cross_entropy(stage(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in stage.trainable_parameters().values():
                if parameter.grad is not None:
                    parameter.sub_(_LR * parameter.grad)
        return stage

    @property
    def _layer_name(self) -> str:
        return self._source.family.facts.adapter_targets[-1]

    @property
    def _adapter_weights(self) -> tuple[Tensor, Tensor]:
        """A and B in the first block."""
        named = self._adapted_stage.trainable_parameters()
        first = [next(named[name] for name in named if name.endswith(f"lora_{side}.weight")) for side in "AB"]
        return first[0], first[1]

    @cached_property
    def _span_check(self) -> SpanCheck:
        every = torch.arange(self._source.vocab_size)[:, None]
        return SpanCheck(layer_inputs(self._adapted_stage, self._layer_name, every).transpose(0, 1))
