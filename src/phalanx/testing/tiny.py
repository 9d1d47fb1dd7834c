"""A run so small that a step takes milliseconds, and batches for it."""

from functools import cache

import numpy as np
import torch

from phalanx.data import DOCUMENTS, IGNORE, Batch, BpeConfig, DataConfig, PythonManualConfig
from phalanx.models import AdapterConfig, ModelConfig
from phalanx.objectives import TokenTable, objective_of
from phalanx.optimizers import OptimizerConfig
from phalanx.pipeline import GuardConfig, PipelineConfig
from phalanx.split import SplitConfig
from phalanx.train import PipelineRun, SplitPipelineRun, StagedRun, TrainConfig
from phalanx.train.batches.rewriting import BatchRewriting

VOCAB_SIZE = 64
_DOCUMENTS_PER_TOKEN = 0.3
_SPECIAL = ("<|endoftext|>", "[MASK]", "<fim_prefix>", "<fim_suffix>", "<fim_middle>")
_SENTINELS = 16
TINY_TOKENS = TokenTable(
    {name: number for number, name in enumerate((*_SPECIAL, *(f"<extra_id_{n}>" for n in range(_SENTINELS))))},
    eos_id=0,
    special=np.arange(VOCAB_SIZE) < len(_SPECIAL) + _SENTINELS,
    begins_word=np.arange(VOCAB_SIZE) % 3 > 0,
)
"""What objectives are told of a tokenizer that there is not; two tokens of three begin a word."""


_objective = cache(objective_of)
"""As a run's loop does, an objective is looked up once, not in each step."""


def tiny_run(
    stages: int = 4,
    *,
    num_layers: int | None = None,
    guard: GuardConfig | None = None,
    pipeline: PipelineConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    adapter: AdapterConfig | None = None,
) -> PipelineRun:
    """Build a run of a GPT-2 of width 16: 8 sequences of 8 tokens a step, in 4 microbatches, without dropout.

    Args:
        stages: Ignored where `pipeline` is given.
        num_layers: One per stage when left out.
        guard: The default guard without audits that a coin or a statistic decides when left out: their number is then
            certain.
        pipeline: Stages, schedule, spares and deadlines.
        optimizer: AdamW at 1e-2 with weight decay and clipping when left out.
    """
    pipeline = pipeline or PipelineConfig(stages=stages, step_timeout_s=30.0)
    return PipelineRun(
        model=ModelConfig(
            from_scratch=True,
            architecture={
                "model_type": "gpt2",
                "n_layer": num_layers or pipeline.stages,
                "n_embd": 16,
                "n_head": 2,
                "vocab_size": VOCAB_SIZE,
                "n_positions": 8,
                # torch's generator is one for all threads of a simulation
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
            },
            adapter=adapter,
        ),
        # never read: a simulation draws its own batches
        data=DataConfig(sources=(PythonManualConfig(),), tokenizer=BpeConfig(), sequence_length=8),
        train=TrainConfig(steps=100, seed=7, batch_size=8, microbatches=4),
        optimizer=optimizer or OptimizerConfig(lr=1e-2, warmup_steps=2, clip_norm=0.5),
        pipeline=pipeline,
        guard=guard or GuardConfig(step_audit_rate=0.0, owner_audit_rate=0.0, gradient_screen=False),
    )


def with_split(run: PipelineRun, split: SplitConfig) -> SplitPipelineRun:
    """Return the run of an enclave that owns the same pipeline."""
    return SplitPipelineRun(**run.written, split=split)


def random_batch(run: StagedRun, vocab_size: int, step: int) -> Batch:
    """Draw the batch of a step; it depends on the run's seed and the step only.

    The first row has no target in its first two places, so that microbatches differ in their number of targets. With
    ``data.attention = "document"`` a document begins at three tokens of ten. An objective that makes rows of its own
    makes them of these, with the tokens of `TINY_TOKENS`.
    """
    generator = torch.Generator().manual_seed(run.train.seed * 1_000_003 + step)
    shape = (run.train.batch_size, run.data.sequence_length + 1)
    tokens = torch.randint(0, vocab_size, shape, generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :2] = IGNORE
    extras = {}
    if run.data.attention == "document":
        begins = torch.rand(labels.shape, generator=generator) < _DOCUMENTS_PER_TOKEN
        extras[DOCUMENTS] = begins.cumsum(dim=1)
    batch = Batch(tokens[:, :-1].contiguous(), labels, tuple(range(shape[0])), extras)
    objective = _objective(run.train.objective)
    if objective.rewriting is None:
        return batch
    rows = objective.rewriting(TINY_TOKENS, run.data.sequence_length)
    samples = range(step * run.train.batch_size, (step + 1) * run.train.batch_size)
    rewrite = BatchRewriting(rows, run.train.seed, objective.attention == "prefix")
    return rewrite(batch, list(samples), [0] * len(samples))
