"""The workloads of `bench pipeline`: two models, as run files would say it, and how long each is measured."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.data import Corpus, DataConfig, prepare_corpus
from phalanx.data.config import BpeConfig, ModelTokenizerConfig
from phalanx.data.phases import DatasetConfig
from phalanx.data.sources import PythonManualConfig
from phalanx.models import ModelConfig, ModelSource, open_model
from phalanx.optimizers import OptimizerConfig
from phalanx.pipeline import GuardConfig, PipelineConfig
from phalanx.train import PipelineRun, RunConfig, TrainConfig

PLAIN = "plain"

_CERTAIN: dict[str, Any] = {"step_audit_rate": 0.0, "owner_audit_rate": 0.0, "gradient_screen": False}

GUARDS: dict[str, GuardConfig] = {
    "unguarded": GuardConfig(mode="off"),
    "guarded_light": GuardConfig(audit_rate=0.125, **_CERTAIN),
    "guarded_full": GuardConfig(audit_rate=1.0, **_CERTAIN),
}
"""Every arm but the plain one, by the guard that makes it. What a coin decides once in dozens of steps cannot be
measured in a dozen: audits of whole steps and by the owner are in `bench overhead`, with their expected number."""

_ONE_GUARD = (("unguarded", "guarded_light"), ("unguarded", "guarded_full"))


@dataclass(frozen=True)
class Workload:
    """One model with its run.

    Attributes:
        run: The run; each arm puts its own guard in.
        rounds: Turns of each arm that are measured.
        budget_s: No new round of a shift begins after this time; the first one always does.
        shifts: Arms that live side by side, beside the plain one; each shift has the unguarded arm as well.
            A model of 135 million parameters takes about 3 GB plain, 5 GB unguarded and 8 GB guarded.
    """

    model: str
    run: PipelineRun
    steps: int
    rounds: int
    warm_ups: int
    budget_s: float
    shifts: tuple[tuple[str, ...], ...] = (tuple(GUARDS),)


def pipeline_workloads(quick: bool) -> list[Workload]:
    """Both models, longer or shorter."""
    if quick:
        return [
            Workload("scratch-10m", scratch_run(), steps=2, rounds=4, warm_ups=1, budget_s=75.0),
            Workload("smollm2-135m", _smollm2_run(16), steps=1, rounds=1, warm_ups=2, budget_s=60.0, shifts=_ONE_GUARD),
        ]
    return [
        Workload("scratch-10m", scratch_run(), steps=4, rounds=6, warm_ups=1, budget_s=900.0),
        Workload("smollm2-135m", _smollm2_run(32), steps=1, rounds=3, warm_ups=2, budget_s=900.0, shifts=_ONE_GUARD),
    ]


def scratch_run(width: int = 288) -> PipelineRun:
    """A model from scratch, 8 blocks: 32 sequences of 128 tokens a step in 8 microbatches, 4 stages.

    Args:
        width: Numbers a token has between blocks, a multiple of 32; 288 makes "scratch-10m", 576 "scratch-34m".
    """
    architecture: dict[str, str | int | float | bool | None] = {
        "model_type": "gpt2",
        "vocab_size": 4096,
        "n_positions": 128,
        "n_embd": width,
        "n_layer": 8,
        "n_head": width // 32,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    data = DataConfig(sources=(PythonManualConfig(),), tokenizer=BpeConfig(vocab_size=4096), sequence_length=128)
    return _workload_run(ModelConfig(from_scratch=True, architecture=architecture), data, lr=1e-3, batch_size=32)


def standard_library() -> Tensor:
    """Return the bytes of modules of Python's standard library, as token ids."""
    library = Path(sysconfig.get_paths()["stdlib"])
    raw = b"".join(path.read_bytes() for path in sorted(library.glob("*.py"))[:60])
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()


def prepare_run(run: RunConfig, cache: Path) -> tuple[ModelSource, Corpus]:
    """Open a run's model and prepare its text, both in the cache."""
    source = open_model(run.model, cache / "models", run.train.seed)
    return source, prepare_corpus(run.data, cache / "data", run.train.seed, source.tokenizer_path, lambda *_: None)


def _smollm2_run(batch_size: int) -> PipelineRun:
    data = DataConfig(sources=(PythonManualConfig(),), tokenizer=ModelTokenizerConfig(), sequence_length=128)
    return _workload_run(ModelConfig(name="smollm2-135m"), data, lr=1e-4, batch_size=batch_size)


def _workload_run(model: ModelConfig, data: DataConfig, lr: float, batch_size: int) -> PipelineRun:
    return PipelineRun(
        model=model,
        data=data,
        train=TrainConfig(steps=1000, batch_size=batch_size, microbatches=8, seed=1),
        optimizer=OptimizerConfig(lr=lr, warmup_steps=10),
        pipeline=PipelineConfig(stages=4),
    )


def dataset_run(dataset: Path, *, layers: int, vocab_size: int, length: int, steps: int, seed: int) -> PipelineRun:
    """Return the run of a small GPT-2 on a dataset, in this process alone, one row for each document."""
    architecture: dict[str, str | int | float | bool | None] = {
        **{"model_type": "gpt2", "vocab_size": vocab_size, "n_positions": length, "n_embd": 64, "n_layer": layers},
        **{"n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0},
    }
    return PipelineRun(
        model=ModelConfig(from_scratch=True, architecture=architecture),
        data=DataConfig(
            dataset=DatasetConfig(path=dataset), sequence_length=length, packing="best_fit", attention="document"
        ),
        train=TrainConfig(steps=steps, seed=seed, batch_size=16, microbatches=1),
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=20),
        pipeline=PipelineConfig(stages=1),
    )
