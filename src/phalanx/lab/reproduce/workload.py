"""The workload of the tables: three families at CPU sizes, three domains, and the regimes of fine-tuning."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from phalanx.data import Corpus, DataConfig
from phalanx.models import ModelConfig
from phalanx.optimizers import OptimizerConfig
from phalanx.pipeline import PipelineConfig
from phalanx.train import PipelineRun, TrainConfig

Architecture = dict[str, str | int | float | bool | None]

STAGES = 6
"""As in the paper: the first and the last one are the owner's, four are in other hands."""
WIDTH = 128
VOCAB_SIZE = 2048
SEQUENCE_LENGTH = 64
BATCH_SIZE = 8
MICROBATCHES = 4


def architecture_of(family: str, width: int) -> Architecture:
    """About 1.5 million parameters at width 128; one block a stage, and no dropout: one thread plays all parties."""
    ends: Architecture = {"bos_token_id": 0, "eos_token_id": 0}
    if family == "gpt2":
        return ends | {
            "model_type": "gpt2",
            "vocab_size": VOCAB_SIZE,
            "n_positions": SEQUENCE_LENGTH,
            "n_embd": width,
            "n_layer": STAGES,
            "n_head": 4,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }
    if family == "opt":
        return ends | {
            "model_type": "opt",
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": SEQUENCE_LENGTH,
            "hidden_size": width,
            "word_embed_proj_dim": width,
            "ffn_dim": 4 * width,
            "num_hidden_layers": STAGES,
            "num_attention_heads": 4,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "pad_token_id": None,
        }
    return ends | {
        "model_type": "bloom",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": width,
        "n_layer": STAGES,
        "n_head": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


FAMILIES = ("gpt2", "opt", "bloom")


@dataclass(frozen=True)
class Regime:
    """A regime in which a pre-trained model is fine-tuned.

    Attributes:
        epochs: Passes over the training split; each ends with a validation.
        clip_norm: Norm limit of the whole gradient; None does not clip.
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
class TableSize:
    """The sizes of a table, which --quick and --small make smaller.

    Attributes:
        text_share: Share of a regime's characters; it scales the number of steps too.
        validation_sequences: Maximum number of sequences of held-out text.
        lr_share: Factor of a regime's learning rate.
    """

    pretraining_steps: int
    pretraining_characters: int
    text_share: float
    width: int = WIDTH
    microbatches: int = MICROBATCHES
    validation_sequences: int = 128
    lr_share: float = 1.0


SIZES: Mapping[str, TableSize] = MappingProxyType(
    {
        "full": TableSize(pretraining_steps=800, pretraining_characters=3_000_000, text_share=1.0),
        "small": TableSize(
            pretraining_steps=800,
            pretraining_characters=1_000_000,
            text_share=0.15,
            width=64,
            microbatches=2,
            validation_sequences=64,
            lr_share=2.0,
        ),
        "quick": TableSize(pretraining_steps=400, pretraining_characters=1_000_000, text_share=0.5),
    }
)
"""`small` has all cells of `full` at a fraction of their cost; `quick` has one seed, family, domain and rate."""
FULL, SMALL, QUICK = SIZES["full"], SIZES["small"], SIZES["quick"]


def optimizer_of(regime: Regime, size: TableSize) -> OptimizerConfig:
    """The paper's optimizer is AdamW with torch's own settings."""
    return OptimizerConfig(
        lr=regime.lr * size.lr_share,
        betas=(0.9, 0.999),
        weight_decay=0.01,
        clip_norm=regime.clip_norm,
        schedule="constant",
    )


def make_table_run(
    model: Path, data: DataConfig, regime: Regime, size: TableSize, steps: int, seed: int
) -> PipelineRun:
    """One fine-tuning, as a run file would say it."""
    return PipelineRun(
        model=ModelConfig(path=str(model)),
        data=data,
        train=TrainConfig(steps=steps, batch_size=BATCH_SIZE, microbatches=size.microbatches, seed=seed),
        optimizer=optimizer_of(regime, size),
        pipeline=PipelineConfig(stages=STAGES),
    )


def steps_per_epoch(corpus: Corpus) -> int:
    """Batches that are nearest to one pass over the training split."""
    return max(1, math.floor(corpus.num_train_sequences / BATCH_SIZE))


def describe_table_size(size: TableSize) -> dict[str, Any]:
    """Everything that decides a figure and is not in its row."""
    return {
        "stages": STAGES,
        "batch_size": BATCH_SIZE,
        "microbatches": size.microbatches,
        "sequence_length": SEQUENCE_LENGTH,
        "vocab_size": VOCAB_SIZE,
        "families": {name: architecture_of(name, size.width) for name in FAMILIES},
        "regimes": {name: vars(regime) for name, regime in REGIMES.items()},
        # what is as in other sizes is left out, so that a new field does not make older rows unknown
        "size": {
            field.name: getattr(size, field.name)
            for field in fields(size)
            if getattr(size, field.name) != field.default
        },
    }
