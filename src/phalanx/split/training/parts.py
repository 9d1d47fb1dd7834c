"""A model in two parts, cut at a depth: a frozen front, and a back part with trained adapters."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.models import (
    AdapterConfig,
    Attention,
    LoraConfig,
    ModelSource,
    Quantization,
    StageModule,
    StageSpec,
    build_stage,
    parameter_names,
)
from phalanx.split.channel.tensor_kinds import WIRE_DTYPES

Precision = Literal["fp32", "bf16"]
"""What matrix products of a part are computed in: of the front always, of the back while it learns."""

Front = Callable[[Tensor], Tensor]
"""What a client runs: ids ``[rows, seq]`` to what leaves, ``[rows, seq, hidden]``, in the precision of the wire."""


def cut_model(num_layers: int, cut: int) -> tuple[StageSpec, StageSpec]:
    """Return the layers of the front and of the back part."""
    if not 1 <= cut < num_layers:
        raise ConfigError(
            f"split.cut = {cut}: the model has {num_layers} layers, and both parts need one; expected 1 to "
            f"{num_layers - 1}"
        )
    return StageSpec(0, 2, 0, cut), StageSpec(1, 2, cut, num_layers)


def computing_in(precision: Precision) -> AbstractContextManager[object]:
    """Return a context in which matrix products are computed so."""
    return torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


@dataclass(frozen=True)
class FewBits:
    """Bits of the matrices and products of a front part.

    Attributes:
        quantize: Format of the matrices of its blocks; None for the format of the files.
    """

    precision: Precision = "fp32"
    quantize: Quantization | None = None


class FrontPart:
    """Embedding and first layers, frozen and without dropout, which a client runs.

    Args:
        wire: Precision of what leaves, a key of `WIRE_DTYPES`.
        document_attention: Whether attention stays inside documents; ids come, and hidden states leave, with their
            borders then, as `with_marks` has it.
        few_bits: Bits of its matrices and products.
    """

    def __init__(
        self,
        source: ModelSource,
        cut: int,
        *,
        attention: Attention = "sdpa",
        wire: str = "fp32",
        document_attention: bool = False,
        few_bits: FewBits = FewBits(),
    ) -> None:
        front, _ = cut_model(source.num_layers, cut)
        # an adapter that is never trained adds zeros
        packed = None if few_bits.quantize is None else LoraConfig(rank=1, quantize=few_bits.quantize)
        self.module = build_stage(
            source, front, adapter=packed, activation_checkpointing=False, attention=attention, seed=0
        )
        self._precision = few_bits.precision
        self.module.attends = "documents" if document_attention else "causal"
        self.module.requires_grad_(False)
        self.module.eval()
        self._dtype = WIRE_DTYPES[wire]

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        """Turn ids ``[rows, seq]`` into what leaves, ``[rows, seq, hidden]``, in the precision of the wire.

        With the borders of documents these are ``[rows, seq, 2]`` and ``[rows, seq, hidden + 1]``.
        """
        with computing_in(self._precision):
            hidden: Tensor = self.module(ids)
        return hidden.to(self._dtype).contiguous()


def build_back(
    source: ModelSource,
    cut: int,
    *,
    adapter: AdapterConfig,
    attention: Attention = "sdpa",
    seed: int = 0,
    activation_checkpointing: bool = False,
    document_attention: bool = False,
) -> StageModule:
    """Build the last layers and the head, with adapters; everything else in it is frozen.

    With `document_attention` it takes hidden states with the borders of documents behind them.
    """
    _, back = cut_model(source.num_layers, cut)
    module = build_stage(
        source,
        back,
        adapter=adapter,
        activation_checkpointing=activation_checkpointing,
        attention=attention,
        seed=seed,
    )
    module.attends = "documents" if document_attention else "causal"
    return module


def all_weights(source: ModelSource, trained: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter of a model; frozen parameters have the values of its files."""
    named = dict(trained)
    yield from named.items()
    for name in parameter_names(source.hub_config):
        if name not in named:
            yield name, source.read_tensor(name)
