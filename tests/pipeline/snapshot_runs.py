"""Runs with shadows that are sent a snapshot every three steps, and what is asked about them."""

import torch

from phalanx.optimizers import OptimizerConfig
from phalanx.pipeline import GuardConfig, PipelineConfig
from phalanx.testing import Actor, tampering, tiny_run

EVERY = 3
# nobody's norm bends anything then, so the owner looks into none
UNCLIPPED = OptimizerConfig(lr=1e-2, warmup_steps=2, clip_norm=None)
NO_COIN = {"step_audit_rate": 0.0, "owner_audit_rate": 0.0}
SNAPSHOT = GuardConfig(shadow="snapshot", snapshot_every=EVERY, **NO_COIN)
SPARE = PipelineConfig(stages=3, spares=1, step_timeout_s=30.0)
ALONE = PipelineConfig(stages=3, step_timeout_s=30.0)
IMPATIENT = PipelineConfig(stages=4, step_timeout_s=60.0, patience_s=0.4)


def run_with(pipeline=None, **changes):
    return tiny_run(guard=SNAPSHOT.model_copy(update=changes), pipeline=pipeline, optimizer=UNCLIPPED)


def audit_at(company, *places):
    """Let the coin fall on these (stage, step) and no others."""
    company.draw.all_messages = lambda *, step, epoch, stage: (stage, step) in places
    return company


def went_back(company):
    return [(body["to"], body["step"]) for body in company.bodies("rolled_back")]


def found(company):
    return [(verdict.party, verdict.offence, verdict.step) for verdict in company.verdicts]


def lying_from(step, factor=1.5):
    return Actor(tampering(lambda direction, at, microbatch, tensor: factor * tensor if at >= step else tensor))


def doubled(payload):
    return (2 * torch.frombuffer(bytearray(payload), dtype=torch.float32)).numpy().tobytes()
