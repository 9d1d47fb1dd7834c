"""Each family is first trained from random weights on text A, once; every fine-tuning starts from that model."""

import hashlib
import importlib.metadata
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file

from phalanx.config import canonical_json
from phalanx.data import BatchLoader, Corpus, DataConfig, validation_batches
from phalanx.data.config import BpeConfig
from phalanx.data.sources import PythonManualConfig
from phalanx.lab.reproduce.attacker import Attacker
from phalanx.lab.reproduce.simulator import NoMessageCheck, Simulator
from phalanx.lab.reproduce.workload import MICROBATCHES, SEQUENCE_LENGTH, STAGES, TableSize, architecture_of
from phalanx.models import ModelConfig, open_model
from phalanx.models.cache import written_once
from phalanx.optimizers import OptimizerConfig
from phalanx.pipeline import PipelineConfig
from phalanx.train import PipelineRun, TrainConfig, step_inputs
from phalanx.train.batches.validation import measure_perplexity
from phalanx.train.setup.layout import make_plan

Say = Callable[[str], None]

_BATCH_SIZE = 16


def pretrained_directory(family: str, corpus: Corpus, size: TableSize, cache: Path, say: Say) -> Path:
    """The directory of a family's pre-trained model, in the hub's layout; made on the first call."""
    key = {
        "architecture": architecture_of(family, size.width),
        "corpus": corpus.digest,
        "steps": size.pretraining_steps,
        "batch_size": _BATCH_SIZE,
        "lr": size.pretraining_lr,
        "versions": [importlib.metadata.version(name) for name in ("torch", "transformers")],
    }
    if size.pretraining_microbatches != MICROBATCHES or size.device != "cpu":
        key |= {"microbatches": size.pretraining_microbatches, "device": size.device}
    name = f"pretrained-{family}-{hashlib.sha256(canonical_json(key)).hexdigest()[:16]}"
    return written_once(cache / "models" / name, lambda home: _pretrain_model(family, corpus, size, cache, home, say))


def _pretrain_model(family: str, corpus: Corpus, size: TableSize, cache: Path, home: Path, say: Say) -> None:
    run = _pretraining_run(family, size)
    source = open_model(run.model, cache / "models", run.train.seed)
    simulator = Simulator(source, make_plan(run, source), Attacker(None))
    loader = BatchLoader(corpus, _BATCH_SIZE, run.train.seed)
    for step in range(run.train.steps):
        inputs = step_inputs(loader.next_batch(), size.pretraining_microbatches)
        attempt = simulator.run_attempt(step, inputs, NoMessageCheck())
        gradients = simulator.take_gradients()
        simulator.update_copies(step, gradients, simulator.combined_clip(gradients))
        if (step + 1) % 100 == 0:
            loss = attempt.loss_sum / (_BATCH_SIZE * SEQUENCE_LENGTH)
            say(f"{family}: pre-training, step {step + 1} of {run.train.steps}, loss about {loss:.2f}")
    perplexity_before = measure_perplexity(simulator.stage_modules, validation_batches(corpus, _BATCH_SIZE))
    say(f"{family}: pre-trained to a perplexity of {perplexity_before:.1f} on held-out text of its own kind")
    tensors = {
        name: tensor.detach().cpu().contiguous()
        for module in simulator.stage_modules
        for name, tensor in module.all_parameters().items()
    }
    save_file(tensors, home / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(source.directory / "config.json", home / "config.json")
    shutil.copyfile(corpus.tokenizer_path, home / "tokenizer.json")


def _pretraining_run(family: str, size: TableSize) -> PipelineRun:
    return PipelineRun(
        model=ModelConfig(from_scratch=True, architecture=architecture_of(family, size.width)),
        # never read: the corpus is at hand
        data=DataConfig(sources=(PythonManualConfig(),), tokenizer=BpeConfig(), sequence_length=SEQUENCE_LENGTH),
        train=TrainConfig(
            steps=size.pretraining_steps,
            batch_size=_BATCH_SIZE,
            microbatches=size.pretraining_microbatches,
            seed=0,
            device=size.device,
        ),
        optimizer=OptimizerConfig(lr=size.pretraining_lr, warmup_steps=min(50, size.pretraining_steps // 4)),
        pipeline=PipelineConfig(stages=STAGES),
    )
