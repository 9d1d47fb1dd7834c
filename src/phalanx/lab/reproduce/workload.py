"""The workload of the tables: three families at CPU sizes, three domains, and the regimes of fine-tuning."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Self

import torch

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
PACKAGED = "smollm2"
"""SmolLM2-135M from its Python package, which others have pre-trained; it has a tokenizer of its own."""
PACKAGED_MODEL = ModelConfig(name="smollm2-135m")


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
class PackagedSize:
    """How the packaged model is fine-tuned, which is 90 times as large; attributes as in `TableSize`."""

    text_share: float
    epochs: int
    batch_size: int
    microbatches: int
    validation_sequences: int
    lr_share: float


@dataclass(frozen=True)
class TableSize:
    """The sizes of a table.

    Attributes:
        pretraining_characters: Of docstrings, which all sizes pre-train on.
        text_share: Share of a regime's characters; it scales the number of steps too.
        validation_sequences: Maximum number of sequences of held-out text.
        lr_share: Factor of a regime's learning rate.
        epochs: Passes in place of a regime's; None leaves them.
        domains: Texts to fine-tune on, in the order in which they are trained.
        rates: Shares of attacked steps, the first one first.
        further_texts: What is pre-trained on beside docstrings, and how many characters of it. What a domain has of the
            same text comes after those documents.
        packaged: None leaves the packaged model out.
        uses_accelerator: Whether stages are computed on a GPU where torch finds one.
    """

    pretraining_steps: int
    pretraining_characters: int
    text_share: float
    width: int = WIDTH
    microbatches: int = MICROBATCHES
    validation_sequences: int = 128
    lr_share: float = 1.0
    batch_size: int = BATCH_SIZE
    epochs: int | None = None
    families: tuple[str, ...] = FAMILIES
    domains: tuple[str, ...] = ("manual", "docstrings", "code")
    seeds: tuple[int, ...] = (0, 1, 2)
    rates: tuple[float, ...] = (0.5, 0.3, 0.7)
    further_texts: tuple[tuple[str, int], ...] = ()
    pretraining_lr: float = 1e-3
    pretraining_microbatches: int = MICROBATCHES
    packaged: PackagedSize | None = None
    uses_accelerator: bool = False

    @property
    def device(self) -> str:
        """Device of all stages."""
        return "cuda" if self.uses_accelerator and torch.cuda.is_available() else "cpu"

    @property
    def all_families(self) -> tuple[str, ...]:
        """Families that are pre-trained here, and the packaged one."""
        return self.families if self.packaged is None else (*self.families, PACKAGED)

    def for_family(self, family: str) -> Self:
        """Return the size of one family's trainings: neither the other kind of family nor its sizes decide them."""
        if family != PACKAGED or self.packaged is None:
            return replace(self, packaged=None)
        return replace(self, packaged=None, families=(PACKAGED,), **asdict(self.packaged))


_LEARNED_DOMAINS = ("wikitext", "medical", "manual")

SIZES: Mapping[str, TableSize] = MappingProxyType(
    {
        "full": TableSize(
            pretraining_steps=20_000,
            pretraining_characters=3_000_000,
            text_share=1.0,
            width=512,
            domains=_LEARNED_DOMAINS,
            further_texts=(("medical", 12_000_000), ("encyclopedia", 1_000_000)),
            packaged=PackagedSize(1.0, epochs=5, batch_size=8, microbatches=4, validation_sequences=128, lr_share=0.4),
            uses_accelerator=True,
        ),
        "learned": TableSize(
            pretraining_steps=800,
            pretraining_characters=300_000,
            text_share=0.3,
            microbatches=2,
            validation_sequences=64,
            domains=_LEARNED_DOMAINS,
            further_texts=(("medical", 2_500_000), ("encyclopedia", 1_000_000)),
            pretraining_lr=3e-3,
            pretraining_microbatches=1,
            packaged=PackagedSize(0.25, epochs=1, batch_size=2, microbatches=1, validation_sequences=12, lr_share=0.4),
        ),
        "small": TableSize(
            pretraining_steps=800,
            pretraining_characters=1_000_000,
            text_share=0.15,
            width=64,
            microbatches=2,
            validation_sequences=64,
            lr_share=2.0,
        ),
        "quick": TableSize(
            pretraining_steps=400,
            pretraining_characters=1_000_000,
            text_share=0.5,
            families=FAMILIES[:1],
            domains=("manual",),
            seeds=(0,),
            rates=(0.5,),
        ),
    }
)
"""`full` is for a GPU; `learned` has its cells at what two cores do in hours. `small` has models that have hardly
learned, in three kinds of text that every installation has; `quick` has one seed, family, domain and rate of it."""
SMALL = SIZES["small"]


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
    model: ModelConfig, data: DataConfig, regime: Regime, size: TableSize, steps: int, seed: int
) -> PipelineRun:
    """One fine-tuning, as a run file would say it."""
    return PipelineRun(
        model=model,
        data=data,
        train=TrainConfig(
            steps=steps, batch_size=size.batch_size, microbatches=size.microbatches, seed=seed, device=size.device
        ),
        optimizer=optimizer_of(regime, size),
        pipeline=PipelineConfig(stages=STAGES),
    )


def steps_per_epoch(corpus: Corpus, batch_size: int = BATCH_SIZE) -> int:
    """Batches that are nearest to one pass over the training split."""
    return max(1, math.floor(corpus.num_train_sequences / batch_size))


def describe_table_size(size: TableSize) -> dict[str, Any]:
    """Everything that decides a figure and is not in its row."""
    return {
        "stages": STAGES,
        "batch_size": size.batch_size,
        "microbatches": size.microbatches,
        "sequence_length": SEQUENCE_LENGTH,
        "vocab_size": VOCAB_SIZE,
        "families": {name: architecture_of(name, size.width) for name in FAMILIES},
        "regimes": {name: vars(regime) for name, regime in REGIMES.items()},
        # what is as in other sizes is left out, so that a new field does not make older rows unknown
        "size": {
            field.name: asdict(size)[field.name] for field in fields(size) if getattr(size, field.name) != field.default
        },
        **({} if size.device == "cpu" else {"device": size.device}),
    }
