"""Activation functions by one kernel each, where transformers composes them of many."""

from torch import nn


def fuse_activations(module: nn.Module) -> None:
    """Let torch's kernel compute GELU by its tanh form, which GPT-2 has: one pass instead of eight.

    Two tensors of the inner width are kept for the backward pass and not five; what comes out differs by rounding.

    Args:
        module: Changed in place, at any depth; other activation functions are left as they are.

    Source: Hendrycks and Gimpel 2016, section 2, the tanh form.
    """
    from transformers.activations import NewGELUActivation  # noqa: PLC0415 - a program with such a model has imported it

    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, NewGELUActivation):
                setattr(parent, name, nn.GELU(approximate="tanh"))
