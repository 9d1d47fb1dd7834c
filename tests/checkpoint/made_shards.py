"""Stages with made-up values, for the tests of checkpoints."""

import torch

from phalanx.checkpoint import Shard

STATE = {"run": "demo", "config_digest": "ab" * 32, "loader": {"position": 7}}


def make_shard(stage, step=0):
    """A stage with values that depend on the step, so that files of two steps differ."""
    generator = torch.Generator().manual_seed(1000 * step + stage)
    weight = torch.randn(8, 16, generator=generator)
    return Shard(
        stage,
        {
            f"weight/layers.{stage}.w": weight,
            f"exp_avg/layers.{stage}.w": weight.to(torch.bfloat16),
            f"exp_avg_sq/layers.{stage}.w": weight.square(),
        },
        num_steps=step,
    )
