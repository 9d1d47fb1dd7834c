"""Attacks on the weights, gradients or optimizer state of a stage."""

from collections.abc import Iterator
from itertools import combinations, islice

import torch
from torch import Tensor, nn

from phalanx.lab.attacks.attack import noise_seed
from phalanx.lab.attacks.states.gradient_attack import GradientAttack
from phalanx.lab.attacks.states.state_attack import StateAttack, UpdateInputs
from phalanx.lab.attacks.states.twin import AlteredModule, AlteredModuleAttack, AlteredWeights
from phalanx.models import StageModule
from phalanx.pipeline import StageCopy


class HalfLayers(AlteredModuleAttack):
    """A stage of one layer is skipped as a whole."""

    def make_module(self, copy: StageCopy) -> StageModule:
        """The stage with the first half of its blocks."""
        return FirstHalf(copy.module)


class FirstHalf(AlteredModule):
    """The first half of the blocks, rounded down."""

    @property
    def own_blocks(self) -> list[nn.Module]:
        """The blocks that are run."""
        blocks = super().own_blocks
        return blocks[: len(blocks) // 2]


class LayerSwap(StateAttack):
    """Swaps all tensors of the stage's first two layers; in a stage of one layer, its first two of one shape."""

    @torch.no_grad()
    def spoil_state(self, copy: StageCopy, update: UpdateInputs) -> None:
        del update
        for first, other in self._weight_pairs(copy):
            saved = first.clone()
            first.copy_(other)
            other.copy_(saved)

    @staticmethod
    def _weight_pairs(copy: StageCopy) -> Iterator[tuple[Tensor, Tensor]]:
        layers = [dict(block.named_parameters()) for block in copy.module.own_blocks]
        if len(layers) >= 2:
            yield from ((weight, layers[1][name]) for name, weight in layers[0].items())
            return
        weights = [weight for layer in layers for weight in layer.values()]
        # equal ones, such as new norms, would be no lie
        pairs = (pair for pair in combinations(weights, 2) if pair[0].shape == pair[1].shape)
        yield from islice((pair for pair in pairs if not torch.equal(*pair)), 1)


class LazyBf16(AlteredModuleAttack):
    """Weights in bfloat16 instead of fp32."""

    def make_module(self, copy: StageCopy) -> StageModule:
        """The stage with rounded weights."""
        return AlteredWeights(copy.module, lambda name, weight: self.round_weight(weight))

    def round_weight(self, weight: Tensor) -> Tensor:
        """The weight as it is computed with."""
        return weight.to(torch.bfloat16).to(weight.dtype)


class LazyInt8(LazyBf16):
    """Matrices in 8-bit integers with one scale per row."""

    levels = 127

    def round_weight(self, weight: Tensor) -> Tensor:
        """Round matrices; biases and norms cost next to nothing and stay."""
        if weight.ndim < 2:
            return weight
        scale = weight.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny) / self.levels
        return torch.round(weight / scale) * scale


class LazyInt4(LazyInt8):
    """Matrices in 4-bit integers with one scale per row."""

    levels = 7


class LyingWeightDigest(AlteredModuleAttack):
    """Every digest is that of the honest state; what runs are weights off by `strength` of their norm.

    No comparison of states can see it: both parties do have the state that they sign. Only the stage's outputs give it
    away.
    """

    def make_module(self, copy: StageCopy) -> StageModule:
        """The stage with other weights than it keeps."""
        return AlteredWeights(copy.module, lambda name, weight: weight + self._weight_offset(name, weight))

    def _weight_offset(self, name: str, weight: Tensor) -> Tensor:
        seed = noise_seed(self.config.seed, f"{self.seed_name} {name}", -1, 0)
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed), dtype=weight.dtype)
        size = self.strength * float(torch.linalg.vector_norm(weight) / torch.linalg.vector_norm(noise))
        return size * noise


class GradientSign(GradientAttack):
    """Uphill instead of downhill."""

    def poison_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: -gradient for name, gradient in gradients.items()}


class GradientScale(GradientAttack):
    """`strength` is the factor; AdamW forgets it after a while, the common clip norm does not."""

    def poison_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.strength * gradient for name, gradient in gradients.items()}


class GradientTopK(GradientAttack):
    """Flips the sign of the largest numbers only; `strength` is their share of each tensor."""

    def poison_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        for gradient in gradients.values():
            flat = gradient.view(-1)
            count = min(max(1, round(self.strength * flat.numel())), flat.numel())
            largest = torch.topk(flat.abs(), count).indices
            flat[largest] = -flat[largest]
        return gradients


class WeightDrift(StateAttack):
    """`strength` is the size of each step's push relative to the norm of each weight tensor."""

    @torch.no_grad()
    def spoil_state(self, copy: StageCopy, update: UpdateInputs) -> None:
        del update
        for name, weight in copy.optimizer.state_tensors().items():
            if name.startswith("weight/"):
                way = self._drift_direction(name, weight)
                weight.add_(way, alpha=self.strength * float(weight.norm()))

    def _drift_direction(self, name: str, weight: Tensor) -> Tensor:
        """A tensor of norm 1 that depends on seed, party and name only."""
        generator = torch.Generator().manual_seed(noise_seed(self.config.seed, f"{self.seed_name} {name}", -1, 0))
        way = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        return (way / float(torch.linalg.vector_norm(way))).to(weight.device)


class WrongLearningRate(StateAttack):
    """`strength` multiplies the learning rate."""

    def spoil_state(self, copy: StageCopy, update: UpdateInputs) -> None:
        """Take the step again, with another rate."""
        copy.optimizer.restore_snapshot()
        copy.optimizer.step(dict(update.gradients), update.lr * self.strength, update.clip_coefficient)


class NoWeightDecay(StateAttack):
    """Matrices do not decay."""

    @torch.no_grad()
    def spoil_state(self, copy: StageCopy, update: UpdateInputs) -> None:
        """Undo the weight decay, which AdamW applies apart from the gradient's step."""
        before, after = copy.optimizer.undo_state(), copy.optimizer.state_tensors()
        for name, weight in after.items():
            if name.startswith("weight/") and weight.ndim >= 2:
                weight.add_(before[name], alpha=update.lr * update.weight_decay)


class SkippedUpdate(StateAttack):
    """The state does not change; only its step number advances."""

    def spoil_state(self, copy: StageCopy, update: UpdateInputs) -> None:
        """Go back, and count the step as taken."""
        copy.optimizer.load_state(copy.optimizer.undo_state(), update.step + 1)
