"""Attacks that change the tensor that a stage sends."""

from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor

from phalanx.lab.attacks.attack import noise_seed
from phalanx.lab.attacks.messages.message_attack import HonestMessage, MessageAttack
from phalanx.pipeline import AttackConfig
from phalanx.pipeline.tolerance.screen import Screen


class Gaussian(MessageAttack):
    """N(0, 1) that owes nothing to the truth; as a gradient, Adam's second moment keeps it for long."""

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        return torch.randn(work.result.shape, generator=generator, dtype=work.result.dtype)


class GaussianAdded(MessageAttack):
    """Noise with the tensor's own mean and standard deviation; `strength` multiplies it."""

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        x = work.result
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        return x + self.strength * (x.mean() + x.std() * noise)


class SkippedStage(MessageAttack):
    """No work for full pay; in a residual network the lie is well-shaped."""

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        del generator
        return work.given.clone()


class Zero(MessageAttack):
    """Zeros: the cheapest lie there is."""

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        del generator
        return torch.zeros_like(work.result)


class Constant(MessageAttack):
    """Every number is `strength`."""

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        del generator
        return torch.full_like(work.result, self.strength)


class NotANumber(MessageAttack):
    """One number of the tensor is NaN, which compares as equal to nothing and spreads to everything."""

    value = float("nan")

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        x = work.result.clone()
        place = int(torch.randint(x.numel(), (), generator=generator))
        x.view(-1)[place] = self.value
        return x


class Infinity(NotANumber):
    """One number of the tensor is infinite."""

    value = float("inf")


class OneSequence(MessageAttack):
    """The sign of one sequence of the microbatch is flipped."""

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        """Negate one sequence, drawn for each message."""
        x = work.result.clone()
        x[int(torch.randint(x.shape[0], (), generator=generator))] *= -1
        return x


class OneToken(MessageAttack):
    """The sign of one token of the microbatch is flipped."""

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        """Negate one token, drawn for each message."""
        x = work.result.clone()
        sequence = int(torch.randint(x.shape[0], (), generator=generator))
        token = int(torch.randint(x.shape[1], (), generator=generator))
        x[sequence, token] *= -1
        return x


class PermutedSequences(MessageAttack):
    """Each sequence gets another one's tensor; nothing changes where a microbatch has one sequence."""

    dim = 0

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        """Shift all by a number of places, drawn for each message, so that none keeps its own."""
        size = work.result.shape[self.dim]
        if size < 2:
            return work.result
        places = 1 + int(torch.randint(size - 1, (), generator=generator))
        return torch.roll(work.result, places, self.dim)


class PermutedTokens(PermutedSequences):
    """Each token gets another one's tensor, within its sequence."""

    dim = 1


class ScaledMessage(MessageAttack):
    """`strength` is the factor: 10 is seen by any statistics, 1.001 by none."""

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        del generator
        return self.strength * work.result


class SlowDrift(MessageAttack):
    """`strength` is the size of the push relative to each token's norm; its direction never changes.

    Small pushes add up over steps where random ones would cancel out.
    """

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        del generator
        sizes: Tensor = torch.linalg.vector_norm(work.result, dim=-1, keepdim=True)
        return work.result + self.strength * sizes * self._drift_direction(work)

    def _drift_direction(self, work: HonestMessage) -> Tensor:
        """A unit vector ``[dim]`` that depends on seed, party, stage and direction only."""
        seed = noise_seed(self.config.seed, f"{self.seed_name} {work.direction}", -1, work.stage)
        way = torch.randn(work.result.shape[-1], generator=torch.Generator().manual_seed(seed))
        return way / float(torch.linalg.vector_norm(way))


class Adaptive(MessageAttack):
    """Turns every token to the other side of its channel means; the norm and all channel means stay as they are.

    The receiver's screen sees nothing move at all, so a lie is never further than one standard deviation
    from its averages. To be sure, the attacker asks a screen of its own first, which has seen all that
    it has sent; where that one would object, it stays honest.
    """

    def __init__(self, config: AttackConfig, party: str, log: Path | None) -> None:
        super().__init__(config, party, log)
        self._screen = Screen()

    def falsify_message(self, work: HonestMessage) -> Tensor:
        sent = super().falsify_message(work)
        self._screen.check_message(work.stage, work.direction, sent)
        return sent

    def lie(self, work: HonestMessage, generator: torch.Generator) -> Tensor:
        del generator
        means = work.result.mean(dim=(0, 1), keepdim=True)
        mirrored = 2 * means - work.result
        # asked of a copy: a screen learns from what it lets pass
        objection = deepcopy(self._screen).check_message(work.stage, work.direction, mirrored)
        return mirrored if objection is None else work.result
