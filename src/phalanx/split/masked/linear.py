"""Frozen linear layers of a model with products that a worker computes without seeing its inputs."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from phalanx.errors import ModelError
from phalanx.models.stage import canonical_name
from phalanx.security.mask import ProductMessage
from phalanx.split.masked.offload_client import OffloadClient

# exactly these: a subclass may read its weight without calling the layer, and so go past the mask
_KINDS: tuple[type[nn.Module], ...] = (nn.Linear, Conv1D)


class MaskedLinear(nn.Module):
    """A layer in the place of a frozen ``nn.Linear`` or ``Conv1D`` of transformers, equal up to fixed-point rounding.

    The offload client computes the product with the weight, and the product of the gradient with its transpose. The
    bias is added here, and may be trained. The layer keeps no weight: the client has it.

    Args:
        layer: The layer that it replaces.

    Guarantees:
        Each call, each backward pass and each recomputation is masked anew. Nothing is saved for the backward pass. The
        output depends on the input alone, bit for bit, whatever the pads were.
    """

    def __init__(self, layer: nn.Module, name: str, offload: OffloadClient) -> None:
        super().__init__()
        weight = _frozen_weight(layer, name)
        self.in_features, self.out_features = int(weight.shape[0]), int(weight.shape[1])
        bias = layer.bias
        self.bias = bias if isinstance(bias, nn.Parameter) else None
        self._offload = offload
        self._forward, self._backward = ProductMessage(name, "forward"), ProductMessage(name, "backward")
        offload.add_layer(name, weight.float().contiguous().numpy())

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``x @ W + bias``, ``[..., out_features]`` for ``[..., in_features]``, in the dtype of `x`."""
        if x.shape[-1] != self.in_features:
            raise ModelError(f"{self._forward.layer}: got {x.shape[-1]} features, expected {self.in_features}")
        y: Tensor = _MaskedProduct.apply(x, self._offload, self._forward, self._backward)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """Show the shape and the name at the offload client."""
        return f"{self._forward.layer}, in_features={self.in_features}, out_features={self.out_features}"


def mask_linears(module: nn.Module, offload: OffloadClient, names: Sequence[str] | None = None) -> list[str]:
    """Put masked layers in the place of a module's frozen linear ones, those inside of LoRA layers included.

    Adapters, and every other layer with a trained weight, stay as they are and are computed here; so do attention
    scores, norms and activations.

    Args:
        module: Built and filled; changed in place.
        offload: The offload client that makes the products.
        names: Names of layers to replace, without the ``base_layer`` of adapters; all that can be replaced when left
            out.

    Raises:
        ModelError: A named layer is missing, not linear, or trained; or nothing can be replaced.
    """
    places_by_name = dict(_layer_places(module))
    if names is None:
        chosen_names = [name for name, places in places_by_name.items() if _can_be_masked(places[0])]
    else:
        chosen_names = list(names)
        missing = [name for name in chosen_names if name not in places_by_name]
        if missing:
            raise ModelError(f"{missing[0]}: is not a layer of this module; use names of named_modules()")
    if not chosen_names:
        raise ModelError(
            "this module has no frozen linear layer, so nothing can be masked; check that some layers are frozen"
        )
    for name in chosen_names:
        # all before the first: a module is changed as a whole or not at all
        _frozen_weight(places_by_name[name][0], name)
    for name in chosen_names:
        place = places_by_name[name]
        masked = MaskedLinear(place[0], name, offload).train(place[0].training)
        for parent, leaf in place[1]:
            parent.add_module(leaf, masked)
    return chosen_names


class _MaskedProduct(torch.autograd.Function):
    """``x @ W`` forward and ``dy @ W^T`` backward; the gradient of W does not exist."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, offload: OffloadClient, forward: ProductMessage, backward: ProductMessage
    ) -> Tensor:
        ctx.offload, ctx.backward_product = offload, backward
        return _multiply_tensor(offload, forward, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _multiply_tensor(ctx.offload, ctx.backward_product, gradient), None, None, None


def _multiply_tensor(offload: OffloadClient, product: ProductMessage, x: Tensor) -> Tensor:
    rows = x.detach().reshape(-1, x.shape[-1]).to("cpu", torch.float32).contiguous()
    y = torch.from_numpy(offload.multiply_rows(product, rows.numpy()))
    return y.reshape(*x.shape[:-1], y.shape[-1]).to(x.device, x.dtype)


def _frozen_weight(layer: nn.Module, name: str) -> Tensor:
    """The weight as ``[inner, columns]``."""
    if type(layer) not in _KINDS:
        raise ModelError(f"{name}: is a {type(layer).__name__}; only frozen nn.Linear and Conv1D layers can be masked")
    weight = layer.get_parameter("weight")
    if weight.requires_grad:
        raise ModelError(f"{name}: its weight is trained, and would change under its mask; freeze it or leave it here")
    if weight.is_meta:
        raise ModelError(f"{name}: has no weights yet; mask after they were loaded")
    stored = weight.detach().cpu()
    return stored if isinstance(layer, Conv1D) else stored.T


def _can_be_masked(layer: nn.Module) -> bool:
    return type(layer) in _KINDS and not layer.get_parameter("weight").requires_grad


_Place = tuple[nn.Module, list[tuple[nn.Module, str]]]
"""A layer, and all parents that have it with the names under which they do."""


def _layer_places(module: nn.Module) -> Iterator[tuple[str, _Place]]:
    """Every layer under its first name; one that occurs twice stays one."""
    by_id: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in module.modules():
        # not named_children(), which leaves out a second name of the same child
        for leaf, child in parent._modules.items():
            by_id.setdefault(id(child), []).append((parent, leaf))
    for name, child in module.named_modules():
        if child is not module:
            yield canonical_name(f"{name}.weight").removesuffix(".weight"), (child, by_id[id(child)])
