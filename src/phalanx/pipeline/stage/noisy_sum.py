"""The noise on a stage's sum of clipped rows: every party with the stage's key computes the same."""

from collections.abc import Mapping

import torch
from torch import Tensor

from phalanx.errors import TrainingError
from phalanx.pipeline.plan import RowPrivacy
from phalanx.security.privacy import gaussian_noise, noise_stream


@torch.no_grad()
def noisy_mean(
    total: Mapping[str, Tensor], privacy: RowPrivacy, step: int, noise_key: bytes | None
) -> dict[str, Tensor]:
    """Add noise to a sum of clipped rows, and divide by the rows that a step has in the mean.

    The number of rows that were there divides nothing, for it depends on whether a row was.

    Args:
        total: Sums by name; not changed.
        noise_key: Noise key of the stage in the step's epoch.

    Raises:
        TrainingError: There is no key; a sum without noise must not leave.

    Guarantees:
        The same arguments give the same bits to parties of one numeric class, which is measured with the noise in it.
    """
    if noise_key is None:
        raise TrainingError(f"privacy: the noise key of step {step} is missing; the owner sends one with each epoch")
    noisy = {}
    for name in sorted(total):
        stream, like = noise_stream(noise_key, step, name), total[name]
        noise = torch.from_numpy(gaussian_noise(stream, like.numel(), privacy.noise_deviation)).view_as(like)
        noisy[name] = like.add(noise.to(like.device)).div_(privacy.mean_rows)
    return noisy
