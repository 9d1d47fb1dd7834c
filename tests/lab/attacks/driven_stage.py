"""What came of driving one stage by hand through whole steps."""

from dataclasses import dataclass, field

import torch

from phalanx.pipeline.protocol.tensor_stream import tensors_digest

MICROBATCHES = 4


@dataclass
class Seen:
    """What a stage sent, what it said that its gradients are, and its state at the beginning of each step."""

    messages: dict[tuple[int, str, int], torch.Tensor] = field(default_factory=dict)
    gradients: dict[int, str] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)

    def differences(self, other):
        """Places in which two parties differ: of messages, of gradients, of states."""
        return (
            {place for place, tensor in self.messages.items() if not same(tensor, other.messages[place])},
            {step for step in self.gradients if self.gradients[step] != other.gradients[step]},
            {step for step in self.states if self.states[step] != other.states[step]},
        )


def same(one, other):
    return one.numpy().tobytes() == other.numpy().tobytes()


def tensor(*where):
    seed = sum(1000**n * (part + 1) for n, part in enumerate(where))
    return torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(seed))


def drive_stage(copy, steps):
    """Run whole steps of a copy on made-up tensors."""
    seen = Seen()
    for step in range(steps):
        state = copy.compute_digest()
        seen.states[step] = state.weights + state.moments
        for m in range(MICROBATCHES):
            seen.messages[step, "forward", m] = copy.runner.forward(step, m, tensor(step, m))
        for m in range(MICROBATCHES):
            seen.messages[step, "backward", m] = copy.runner.backward(step, m, tensor(step, m, 1))
        gradients = copy.runner.take_gradients()
        seen.gradients[step] = tensors_digest(gradients)
        copy.apply_update(step, gradients, 1.0)
    return seen
