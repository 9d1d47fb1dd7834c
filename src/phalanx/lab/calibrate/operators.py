"""Differences operator by operator: the same inputs to every attention, MLP, linear layer and norm of a stage."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from phalanx.models import StageModule

Operator = Literal["attention", "mlp", "linear", "norm"]
OPERATORS: tuple[Operator, ...] = ("attention", "mlp", "linear", "norm")
LEVELS: tuple[frozenset[Operator], ...] = (frozenset({"attention", "mlp"}), frozenset({"linear", "norm"}))
"""Outer operators and those inside them: with its inner inputs replaced an outer one would show nothing."""

Recorded = dict[str, tuple[Tensor, Tensor]]
"""Input and output of each operator, by its name in the stage."""


def operators_of(stage: StageModule) -> dict[str, Operator]:
    """Kind of each operator inside the stage's own blocks, by its name in the stage.

    A model without an MLP module of its own (OPT) has its linear layers only.
    """
    module_ids = {id(module) for block in stage.own_blocks for module in block.modules()}
    kinds = {}
    for name, module in stage.named_modules():
        kind = _operator_kind(module)
        if id(module) in module_ids and kind is not None:
            kinds[name] = kind
    return kinds


@contextlib.contextmanager
def record_operators(stage: StageModule) -> Iterator[Recorded]:
    """Note what goes into and comes out of every operator while the stage runs."""
    notes: Recorded = {}
    with _with_hooks(stage, operators_of(stage), lambda _name, _x: None, notes):
        yield notes


@contextlib.contextmanager
def replay_operators(stage: StageModule, earlier: Recorded, kinds: frozenset[Operator]) -> Iterator[Recorded]:
    """Give every operator of these kinds the input that it had `earlier`, cast to its present type.

    What differs then is the operator's own doing, not that of those before it.

    Args:
        earlier: Record made by `record_operators`.
        kinds: One of `LEVELS`.
    """
    notes: Recorded = {}
    names = [name for name, kind in operators_of(stage).items() if kind in kinds]
    with _with_hooks(stage, names, lambda name, x: earlier[name][0].to(x.device, x.dtype), notes):
        yield notes


@contextlib.contextmanager
def _with_hooks(
    stage: StageModule, names: Iterable[str], substitute: Callable[[str, Tensor], Tensor | None], notes: Recorded
) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in names:
            module = stage.get_submodule(name)
            entering: list[Tensor] = []
            before = module.register_forward_pre_hook(_make_pre_hook(name, substitute, entering), with_kwargs=True)
            after = module.register_forward_hook(_make_post_hook(name, entering, notes))
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield


def _make_pre_hook(name: str, substitute: Callable[[str, Tensor], Tensor | None], entering: list[Tensor]) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        x = args[0] if args else kwargs["hidden_states"]
        replacement = substitute(name, x)
        entering[:] = [x if replacement is None else replacement]
        if args:
            return (entering[0], *args[1:]), kwargs
        return args, kwargs | {"hidden_states": entering[0]}

    return hook


def _make_post_hook(name: str, entering: list[Tensor], notes: Recorded) -> Any:
    def hook(_module: nn.Module, _args: Any, out: Any) -> None:
        notes[name] = (entering[0], out[0] if isinstance(out, tuple) else out)

    return hook


def _operator_kind(module: nn.Module) -> Operator | None:
    name = type(module).__name__.lower()
    if isinstance(module, nn.Linear | Conv1D):
        return "linear"
    if name.endswith("norm"):
        return "norm"
    if name.endswith("attention"):
        return "attention"
    return "mlp" if name.endswith("mlp") else None
