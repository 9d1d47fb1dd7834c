"""The runs of ``phalanx bench split``: sizes and modes."""

from dataclasses import dataclass
from typing import Any, Literal

from phalanx.data import DataConfig
from phalanx.data.config import BpeConfig
from phalanx.data.sources import PythonManualConfig
from phalanx.models import LoraConfig, ModelConfig
from phalanx.optimizers import OptimizerConfig
from phalanx.split import SplitConfig
from phalanx.train import SplitRun, TrainConfig

_CUT = 2
_CLIENTS, _ROWS, _MICROBATCHES = 3, 12, 6


@dataclass(frozen=True)
class SplitSize:
    """A model that is trained, and the precision in which it crosses.

    Attributes:
        layers: Number of layers, two of them at the clients.
        seq: Tokens of a sequence; a frame holds two sequences.
    """

    width: int
    layers: int
    heads: int
    seq: int
    wire: Literal["fp32", "bf16"] = "fp32"


@dataclass(frozen=True)
class SplitArm:
    """One arm of the split bench."""

    mode: Literal["plaintext", "sealed", "masked"]
    size: SplitSize

    @property
    def arm_label(self) -> str:
        """One line for the progress."""
        size = self.size
        return f"{self.mode}, width {size.width}, {size.layers} layers, {size.seq} tokens, {size.wire}"

    def as_row(self) -> dict[str, Any]:
        """What a row says of it."""
        size = self.size
        return {"mode": self.mode, "width": size.width, "layers": size.layers, "seq": size.seq, "wire": size.wire}


_SMALL = SplitSize(256, 4, 8, 64)
_SIZES = (
    _SMALL,
    SplitSize(256, 4, 8, 64, "bf16"),
    SplitSize(256, 4, 8, 256),
    SplitSize(384, 6, 6, 128),
    SplitSize(576, 8, 9, 128),
    SplitSize(576, 8, 9, 128, "bf16"),
    SplitSize(256, 12, 8, 128),
    SplitSize(256, 12, 8, 128, "bf16"),
    SplitSize(384, 12, 6, 128),
)
"""From a toy that ends at once to the width of SmolLM2-135M at a third of its depth; two narrow, deep as GPT-2."""
_QUICK_SIZES = (_SIZES[0], _SIZES[3], _SIZES[4], _SIZES[6], _SIZES[7])


def arms_of(quick: bool) -> tuple[SplitArm, ...]:
    """Return the arms, plaintext before its comparisons; masked at the smallest size alone."""
    arms = [SplitArm("plaintext", _SMALL), SplitArm("sealed", _SMALL), SplitArm("masked", _SMALL)]
    for size in (_QUICK_SIZES if quick else _SIZES)[1:]:
        arms += [SplitArm("plaintext", size), SplitArm("sealed", size)]
    return tuple(arms)


def make_split_run(arm: SplitArm, steps: int) -> SplitRun:
    """The run of an arm: three clients with two microbatches of two sequences each, in every step."""
    size = arm.size
    architecture: dict[str, str | int | float | bool | None] = {
        "model_type": "gpt2",
        "vocab_size": 2048,
        "n_positions": size.seq,
        "n_embd": size.width,
        "n_layer": size.layers,
        "n_head": size.heads,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    settings: dict[str, Any] = {"mode": arm.mode, "cut": _CUT, "clients": _CLIENTS, "wire": size.wire}
    settings |= {"insecure": True} if arm.mode == "plaintext" else {"allow_insecure_sim": True}
    data = DataConfig(
        sources=(PythonManualConfig(),),
        tokenizer=BpeConfig(vocab_size=2048),
        sequence_length=size.seq,
        max_documents=60,
        max_validation_sequences=4,
    )
    return SplitRun(
        model=ModelConfig(from_scratch=True, architecture=architecture, adapter=LoraConfig()),
        data=data,
        train=TrainConfig(steps=steps, batch_size=_ROWS, microbatches=_MICROBATCHES, seed=1),
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=2),
        split=SplitConfig(**settings),
    )
