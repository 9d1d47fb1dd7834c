"""One cell of `bench detection`: a small run with its guard, its attack and the ways in which its workers compute."""

from dataclasses import dataclass

from phalanx.lab.calibrate import NumericPath
from phalanx.models import LoraConfig
from phalanx.pipeline import PRESETS, AttackConfig, GuardConfig, PipelineConfig
from phalanx.testing import tiny_run
from phalanx.train import PipelineRun, TrainConfig

GUARDS: dict[str, GuardConfig] = {
    "watchful": GuardConfig(audit_rate=1 / 4, step_audit_rate=1 / 8, owner_audit_rate=1 / 8, keep_states=64),
    **{name: GuardConfig(preset=name) for name in PRESETS},
    "off": GuardConfig(mode="off"),
}
"""Guards by the name in the rows; `watchful` has rates that show every layer in some dozens of steps."""

_PATIENCE_S = 2.0
_WIDTH, _SEQUENCE, _BATCH, _MICROBATCHES = 32, 16, 16, 8


@dataclass(frozen=True)
class DetectionCell:
    """One company to play.

    Attributes:
        run: Run with its guard and its attack; kind "none" is an honest company.
        steps: Maximum number of steps; with an attacker the run ends two steps after the last exclusion.
        paths: Numeric paths of the workers, in turns; empty, all follow the run, and digests are compared. With
            several, each is a numeric class of its own, and distances are compared.
    """

    run: PipelineRun
    guard: str
    steps: int
    paths: tuple[NumericPath, ...] = ()


def small_run(
    stages: int,
    guard: str,
    *,
    attack: AttackConfig | None = None,
    schedule: str = "1f1b",
    adapter: LoraConfig | None = None,
) -> PipelineRun:
    """A GPT-2 of width 32 with two layers in each middle stage: 16 sequences of 16 tokens a step, in 8 microbatches."""
    layers = (1, *(2 for _ in range(stages - 2)), 1)
    pipeline = PipelineConfig(
        stages=stages, schedule=schedule, layers=layers, step_timeout_s=60.0, patience_s=_PATIENCE_S
    )
    run = tiny_run(num_layers=sum(layers), pipeline=pipeline, adapter=adapter)
    architecture = {**(run.model.architecture or {}), "n_embd": _WIDTH, "n_positions": _SEQUENCE}
    return PipelineRun(
        model=run.model.model_copy(update={"architecture": architecture}),
        data=run.data.model_copy(update={"sequence_length": _SEQUENCE}),
        train=TrainConfig(steps=300, seed=7, batch_size=_BATCH, microbatches=_MICROBATCHES),
        optimizer=run.optimizer,
        pipeline=pipeline,
        guard=GUARDS[guard],
        attack=attack or AttackConfig(),
    )
