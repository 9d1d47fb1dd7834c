"""A run that is as small as can be, with texts of its own."""

from pathlib import Path

import pytest

from phalanx.data import DataConfig
from phalanx.data.config import BpeConfig
from phalanx.data.sources import TextConfig
from phalanx.models import ModelConfig
from phalanx.optimizers import OptimizerConfig
from phalanx.pipeline import PipelineConfig
from phalanx.train import PipelineRun, TrainConfig


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineRun:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    texts = tmp_path / "texts"
    texts.mkdir()
    for n in range(40):
        (texts / f"{n}.txt").write_text(f"text {n} speaks of shields, of stages and of neighbours. " * 10)
    architecture = {"model_type": "gpt2", "vocab_size": 300, "n_positions": 16, "n_embd": 16, "n_layer": 4, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return PipelineRun(
        model=ModelConfig(from_scratch=True, architecture={**architecture, **ends}),
        data=DataConfig(sources=(TextConfig(path=texts),), tokenizer=BpeConfig(vocab_size=300), sequence_length=16),
        train=TrainConfig(steps=100, batch_size=4, microbatches=2, seed=1),
        optimizer=OptimizerConfig(lr=1e-3),
        pipeline=PipelineConfig(stages=4),
    )
