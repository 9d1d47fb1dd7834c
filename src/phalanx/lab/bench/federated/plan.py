"""The sizes of the bench, and the rows, weights and settings that every arm is given."""

from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from safetensors.torch import save_file

from phalanx.config import StrictModel
from phalanx.data import DataConfig
from phalanx.data.config import ModelTokenizerConfig
from phalanx.data.sources import PythonManualConfig
from phalanx.federated.config import FederatedConfig
from phalanx.models import LoraConfig, ModelConfig, open_model
from phalanx.optimizers import OptimizerConfig
from phalanx.train import FederatedRun, TrainConfig
from phalanx.train.batches.site_data import SharedTexts
from phalanx.train.setup.whole_model import load_whole_model

SITES = ("north", "south", "east")
TARGETS = ("q_proj", "v_proj")


class FederatedPlan(StrictModel):
    """The sizes of the bench.

    Attributes:
        layers: Blocks of SmolLM2-135M, which has 30.
        local_steps: Number of steps of a site in a round.
        turns: Measured ones of each arm; one more warms up.
        summed_values: Number of values in the secure sum that is timed alone.
        summed_clients: Number of clients in that sum; each has all others for neighbours.
        private_rows: Number of rows of a step with differential privacy.
        private_steps: Measured ones of each way.
    """

    layers: int = 6
    rank: int = 8
    length: int = 64
    batch_size: int = 4
    local_steps: int = 4
    rounds: int = 2
    turns: int = 4
    summed_values: int = 40_000_000
    summed_clients: int = 11
    private_rows: int = 8
    private_steps: int = 8

    @property
    def total_rounds(self) -> int:
        """Rounds of an arm."""
        return self.rounds * (self.turns + 1)


class FederatedSpec(StrictModel):
    """The order of one arm; programs of peers read the same file.

    Attributes:
        layers: Blocks that are kept of it.
        start: Adapter that all start from.
        rows: ``SITE/ids`` and ``SITE/labels`` of all rounds, in their order.
        run: Run of this package; peers ignore it.
    """

    model: str
    layers: int
    start: str
    rows: str
    sites: tuple[str, ...] = SITES
    rounds: int
    directory: str
    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS
    lr: float
    betas: tuple[float, float]
    local_steps: int
    batch_size: int
    run: FederatedRun


class RoundsRequest(StrictModel):
    """So many further rounds."""

    rounds: int


class SiteReport(StrictModel):
    """One line of a site: its model was loaded, or it has trained a round."""

    load: int = 0
    round: int = 0
    loss: float | None = None
    train_s: float = 0.0
    train_cpu_s: float | None = None
    bytes: int = 0


class RoundsReport(StrictModel):
    """What sites have said since the last one; the first line of a process has its version instead."""

    version: str | None = None
    sites: dict[str, tuple[SiteReport, ...]] = Field(default_factory=dict)


def make_federated_run(plan: FederatedPlan, *, secure: bool) -> FederatedRun:
    """Return the run of this package's arms."""
    return FederatedRun(
        model=ModelConfig(name="smollm2-135m", layers=plan.layers, adapter=LoraConfig(rank=plan.rank, targets=TARGETS)),
        data=DataConfig(sources=(PythonManualConfig(),), tokenizer=ModelTokenizerConfig(), sequence_length=plan.length),
        train=TrainConfig(steps=plan.total_rounds, batch_size=plan.batch_size, microbatches=1, seed=1),
        optimizer=OptimizerConfig(lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, schedule="constant"),
        federated=FederatedConfig(sites=SITES, min_cohort=3, local_steps=plan.local_steps, secure=secure),
    )


def write_spec(plan: FederatedPlan, cache: Path, directory: Path) -> FederatedSpec:
    """Write weights and rows for all arms, and return their specification."""
    run = make_federated_run(plan, secure=False)
    source = open_model(run.model, cache / "models", run.train.seed)
    texts = SharedTexts(run, source, cache / "data", lambda phase, count: None)
    save_file(load_whole_model(run, source, 0).copy_weights(), directory / "start.safetensors")
    rows: dict[str, Any] = {}
    for site in run.federated.sites:
        data, size = texts.share_of(site), plan.batch_size
        batches = [
            batch
            for round_index in range(plan.total_rounds)
            for batch in data.round_batches(round_index + 1, plan.local_steps, size)
        ]
        rows[f"{site}/ids"] = torch.cat([batch.input_ids for batch in batches])
        rows[f"{site}/labels"] = torch.cat([batch.labels for batch in batches])
    save_file(rows, directory / "rows.safetensors")
    adapter = run.model.adapter
    if not isinstance(adapter, LoraConfig):
        raise TypeError("the bench trains LoRA")
    return FederatedSpec(
        model=str(source.directory),
        layers=plan.layers,
        start=str(directory / "start.safetensors"),
        rows=str(directory / "rows.safetensors"),
        rounds=plan.total_rounds,
        directory=str(directory),
        rank=adapter.rank,
        alpha=adapter.alpha,
        lr=run.optimizer.lr,
        betas=run.optimizer.betas,
        local_steps=plan.local_steps,
        batch_size=plan.batch_size,
        run=run,
    )
