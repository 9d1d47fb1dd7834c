"""Memory of a stage for its backward pass: recomputation, and activation functions by one kernel each."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from phalanx.parallel.config import Recompute
from phalanx.parallel.context.ring import RING

Run = Callable[..., Tensor]

_OPS = torch.ops.aten
_KEPT = {
    _OPS.mm.default,
    _OPS.addmm.default,
    _OPS.bmm.default,
    _OPS.baddbmm.default,
    _OPS._scaled_dot_product_flash_attention_for_cpu.default,
    _OPS._scaled_dot_product_flash_attention.default,
    _OPS._scaled_dot_product_efficient_attention.default,
    _OPS._scaled_dot_product_cudnn_attention.default,
    RING,
}


def recompute_function(run: Run, how: Recompute) -> Run:
    """Return a function that gives the same result and keeps less for its backward pass.

    Args:
        run: Function that computes a block.
        how: "none" keeps everything; "selective" keeps products of matrices and attention, which cost most to compute
            and little to keep; "full" keeps the inputs alone.
    """
    if how == "none":
        return run
    if how == "full":
        return functools.partial(_recompute_all, run)
    contexts = functools.partial(create_selective_checkpoint_contexts, _checkpoint_policy)
    return functools.partial(_recompute_all, run, context_fn=contexts)


def _recompute_all(run: Run, *args: Any, **options: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return run(*args)
    result: Tensor = checkpoint(run, *args, use_reentrant=False, **options)
    return result


def _checkpoint_policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def fuse_activations(module: nn.Module) -> None:
    """Let torch's kernel compute GELU by its tanh form, which GPT-2 has: one pass instead of eight.

    Two tensors of the inner width are stored for the backward pass and not five; the results differ by rounding.

    Args:
        module: Changed in place, at any depth; other activation functions are left as they are.

    Source: Hendrycks and Gimpel 2016, section 2, the tanh form.
    """
    from transformers.activations import NewGELUActivation  # noqa: PLC0415 - a program with such a model has imported it

    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, NewGELUActivation):
                setattr(parent, name, nn.GELU(approximate="tanh"))
