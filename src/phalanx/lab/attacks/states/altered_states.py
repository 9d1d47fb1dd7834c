"""Attacks on the weights, gradients or optimizer state of a stage."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, islice

import torch
from torch import Tensor, nn

from phalanx.lab.attacks.attack import Attack, noise_seed, same_bits
from phalanx.lab.attacks.copies import AttackedCopy, AttackedRunner, honest_part
from phalanx.lab.attacks.states.gradient_attack import GradientAttack
from phalanx.models import CAUSAL, AttentionPattern, StageModule
from phalanx.pipeline import StageCopy, StageRunner


class StateAttack(Attack, ABC):
    """Spoils the state of the stages that a party holds; its computation with that state is honest.

    A state belongs to the step that begins with it: with ``from_step = 3`` the update after step 2 is the
    first that is spoilt, and step 3 the first that is attacked.
    """

    @abstractmethod
    def spoil_state(self, copy: StageCopy, update: "UpdateInputs") -> None:
        """Change the copy, which has just taken an honest step; its snapshot is the state before that."""

    def wrap_copy(self, copy: StageCopy, held: bool) -> StageCopy:
        return SpoiltCopy(honest_part(copy), self) if held else copy


class UpdateInputs:
    """The inputs of an optimizer step."""

    def __init__(self, copy: StageCopy, step: int, gradients: Mapping[str, Tensor], clip_coefficient: float) -> None:
        config = copy.plan.optimizer
        self.step = step
        self.gradients = gradients
        self.clip_coefficient = clip_coefficient
        self.lr = copy.plan.learning_rate(step)
        self.weight_decay = config.weight_decay


class SpoiltCopy(AttackedCopy):
    """A copy with an optimizer that breaks the rules in the steps of the attack."""

    def __init__(self, honest: StageCopy, attack: StateAttack) -> None:
        super().__init__(honest)
        self._attack = attack

    def apply_update(self, step: int, gradients: Mapping[str, Tensor], clip_coefficient: float) -> None:
        if not self._attack.lies_in(step + 1):
            super().apply_update(step, gradients, clip_coefficient)
            return
        self.optimizer.keep_snapshot()
        super().apply_update(step, gradients, clip_coefficient)
        truth = self.compute_digest()
        self._attack.spoil_state(self, UpdateInputs(self, step, gradients, clip_coefficient))
        if self.compute_digest() != truth:
            self._attack.log_lie(self.spec.index, self.step_count, what="state")


class AlteredModule(StageModule):
    """Another module's parameters and names; subclasses compute something else with them."""

    def __init__(self, whole: StageModule) -> None:
        nn.Module.__init__(self)
        # the very same parts: what the twin's backward adds to a gradient, it adds to the stage's own
        vars(self).update(vars(whole))


class AlteredWeights(AlteredModule):
    """Computes with altered weights; gradients reach the true weights as if they were the altered ones."""

    _whole: StageModule

    def __init__(self, whole: StageModule, alter: Callable[[str, Tensor], Tensor]) -> None:
        super().__init__(whole)
        self._alter = alter
        # not registered as a part: the parts are shared with it
        vars(self)["_whole"] = whole

    def forward(self, x: Tensor, pattern: AttentionPattern = CAUSAL) -> Tensor:
        altered = {
            name: weight + (self._alter(name, weight.detach()) - weight).detach()
            for name, weight in self._whole.named_parameters()
        }
        result: Tensor = torch.func.functional_call(self._whole, altered, (x, pattern))
        return result


class AlteredModuleAttack(Attack, ABC):
    """Runs a twin instead of the stage: activations, gradients and weight gradients are all the twin's."""

    @abstractmethod
    def make_module(self, copy: StageCopy) -> StageModule:
        """What computes instead of the copy's module."""

    def wrap_copy(self, copy: StageCopy, held: bool) -> StageCopy:
        honest = honest_part(copy)
        return AttackedCopy(honest, AlteredModuleRunner(honest, self)) if held else copy


class AlteredModuleRunner(AttackedRunner):
    """Runs the twin in the steps of the attack; the truth is computed beside it, for the attacker's log."""

    def __init__(self, honest: StageCopy, attack: AlteredModuleAttack) -> None:
        super().__init__(honest.runner)
        plan = honest.plan
        self._attack = attack
        self._twin = StageRunner(
            attack.make_module(honest), honest.spec, seed=plan.seed, precision=plan.arithmetic, device=plan.device
        )
        self._inputs: dict[int, Tensor] = {}

    def forward(self, step: int, microbatch: int, x: Tensor) -> Tensor:
        if not self._attack.lies_in(step):
            return self._honest.forward(step, microbatch, x)
        self._inputs[microbatch] = x
        sent = self._twin.forward(step, microbatch, x)
        truth, _ = self._honest.recompute_microbatch(step, microbatch, x, None)
        return self._choose_result("forward", step, microbatch, sent, truth)

    def backward(self, step: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        x = self._inputs.pop(microbatch, None)
        if x is None:
            return self._honest.backward(step, microbatch, gradient)
        sent = self._twin.backward(step, microbatch, gradient)
        _, truth = self._honest.recompute_microbatch(step, microbatch, x, gradient)
        if sent is None or truth is None:
            return sent
        return self._choose_result("backward", step, microbatch, sent, truth)

    def abandon_step(self) -> None:
        self._honest.abandon_step()
        self._twin.abandon_step()
        self._inputs.clear()

    def _choose_result(self, direction: str, step: int, microbatch: int, sent: Tensor, truth: Tensor) -> Tensor:
        if not self._attack.lies_towards(direction):
            return truth
        if not same_bits(sent, truth):
            self._attack.log_lie(self.spec.index, step, microbatch=microbatch, direction=direction)
        return sent


class HalfLayers(AlteredModuleAttack):
    """A stage of one layer is skipped as a whole."""

    def make_module(self, copy: StageCopy) -> StageModule:
        return FirstHalf(copy.module)


class FirstHalf(AlteredModule):
    """The first half of the blocks, rounded down."""

    @property
    def own_blocks(self) -> list[nn.Module]:
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
