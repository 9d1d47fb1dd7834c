"""What is trained: three families at CPU sizes, three domains, and the regimes in which they are fine-tuned."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from phalanx.data import Corpus, DataConfig
from phalanx.models import ModelConfig
from phalanx.optimizers import OptimizerConfig
from phalanx.pipeline import PipelineConfig
from phalanx.train import RunConfig, TrainConfig

Architecture = dict[str, str | int | float | bool | None]

STAGES = 6
"""As in the paper: the first and the last one are the owner's, four are in other hands."""
WIDTH = 128
VOCAB_SIZE = 2048
SEQUENCE_LENGTH = 64
BATCH_SIZE = 8
MICROBATCHES = 4

FAMILIES: Mapping[str, Architecture] = MappingProxyType(
    {
        "gpt2": {
            "model_type": "gpt2",
            "vocab_size": VOCAB_SIZE,
            "n_positions": SEQUENCE_LENGTH,
            "n_embd": WIDTH,
            "n_layer": STAGES,
            "n_head": 4,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        "opt": {
            "model_type": "opt",
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": SEQUENCE_LENGTH,
            "hidden_size": WIDTH,
            "word_embed_proj_dim": WIDTH,
            "ffn_dim": 4 * WIDTH,
            "num_hidden_layers": STAGES,
            "num_attention_heads": 4,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "pad_token_id": None,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        "bloom": {
            "model_type": "bloom",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": WIDTH,
            "n_layer": STAGES,
            "n_head": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    }
)
"""About 1.5 million parameters each, one block a stage; without dropout, so that one thread can play all parties."""


@dataclass(frozen=True)
class Regime:
    """How a pre-trained model is fine-tuned.

    Attributes:
        characters: Of the domain, over both splits.
        validation_share: Of its documents.
        epochs: Passes over the training split; each ends with a validation.
        lr: Constant.
        clip_norm: Of the whole gradient; None does not clip.
    """

    characters: int
    validation_share: float
    epochs: int
    lr: float
    clip_norm: float | None


REGIMES: Mapping[str, Regime] = MappingProxyType(
    {
        "plain": Regime(characters=100_000, validation_share=0.3, epochs=5, lr=5e-4, clip_norm=1.0),
        "unclipped": Regime(characters=100_000, validation_share=0.3, epochs=5, lr=5e-4, clip_norm=None),
        "overfit": Regime(characters=40_000, validation_share=0.5, epochs=17, lr=1e-3, clip_norm=1.0),
    }
)
"""``plain`` is the paper's five epochs; ``unclipped`` lets an attacked gradient through at its full size; ``overfit``
has many epochs over far less text, where whatever trains less may look better at the last one."""


@dataclass(frozen=True)
class Size:
    """What --quick makes smaller."""

    pretraining_steps: int
    pretraining_characters: int
    text_share: float


FULL = Size(pretraining_steps=800, pretraining_characters=3_000_000, text_share=1.0)
QUICK = Size(pretraining_steps=400, pretraining_characters=1_000_000, text_share=0.5)


def optimizer_of(regime: Regime) -> OptimizerConfig:
    """The paper's optimizer is AdamW with torch's own settings."""
    return OptimizerConfig(
        lr=regime.lr, betas=(0.9, 0.999), weight_decay=0.01, clip_norm=regime.clip_norm, schedule="constant"
    )


def run_of(model: Path, data: DataConfig, regime: Regime, steps: int, seed: int) -> RunConfig:
    """One fine-tuning, as a run file would say it."""
    return RunConfig(
        model=ModelConfig(path=str(model)),
        data=data,
        train=TrainConfig(steps=steps, batch_size=BATCH_SIZE, microbatches=MICROBATCHES, seed=seed),
        optimizer=optimizer_of(regime),
        pipeline=PipelineConfig(stages=STAGES),
    )


def steps_per_epoch(corpus: Corpus) -> int:
    """Batches that are nearest to one pass over the training split."""
    return max(1, math.floor(corpus.num_train_sequences / BATCH_SIZE))


def describe(size: Size) -> dict[str, Any]:
    """Everything that decides a figure and is not in its row."""
    return {
        "stages": STAGES,
        "batch_size": BATCH_SIZE,
        "microbatches": MICROBATCHES,
        "sequence_length": SEQUENCE_LENGTH,
        "vocab_size": VOCAB_SIZE,
        "families": {name: dict(architecture) for name, architecture in FAMILIES.items()},
        "regimes": {name: vars(regime) for name, regime in REGIMES.items()},
        "size": vars(size),
    }
