"""Orders of rank 0 to the other ranks of its group; JSON over a pipe, tensors over the group."""

from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationError
from torch import Tensor
from torch import distributed as dist

from phalanx.config import StrictModel
from phalanx.errors import FrameError

Operation = Literal[
    "build",
    "weights",
    "frozen",
    "forward",
    "backward",
    "recompute",
    "gradients",
    "abandon",
    "load",
    "update",
    "snapshot",
    "collect",
]
StateSource = Literal["present", "snapshot"]
"""State of a stage: the present one, or the last snapshot's."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int64": torch.int64}


class TensorSpec(StrictModel):
    """A tensor that follows an order."""

    shape: tuple[int, ...]
    dtype: Literal["float32", "bfloat16", "float16", "int64"]


class GroupCommand(StrictModel):
    """One thing that all ranks do together.

    Attributes:
        step: Optimizer step, where the operation has one.
        microbatch: Index in the step, where the operation has one.
        cargo: Tensors that rank 0 broadcasts right after, by name.
        dropped: Copies that are no longer used.
        plan: The run's plan, for building.
        names: Tensors of the state that are asked for.
        clip_coefficient: Multiplies the gradients of an update.
    """

    operation: Operation
    copy_id: Annotated[int, Field(ge=0)]
    step: int = 0
    microbatch: int = 0
    cargo: dict[str, TensorSpec] = Field(default_factory=dict)
    dropped: tuple[int, ...] = ()
    stage: int = 0
    plan: dict[str, Any] | None = None
    names: tuple[str, ...] = ()
    source: StateSource = "present"
    learning_rate: float = 0.0
    clip_coefficient: float = 1.0


def read_order(line: bytes) -> GroupCommand:
    """Parse an order."""
    try:
        return GroupCommand.model_validate_json(line)
    except ValidationError as exc:
        raise FrameError(f"stage group: rank 0 sent no order: {exc}; all ranks must run the same version") from exc


def describe_tensor(tensor: Tensor) -> TensorSpec:
    """Describe a tensor that will be broadcast."""
    return TensorSpec.model_validate({"shape": tuple(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")})


def broadcast_tensor(tensor: Tensor | None, cargo: TensorSpec, device: torch.device) -> Tensor:
    """Give every rank rank 0's tensor; all of them call this together."""
    mine = torch.empty(cargo.shape, dtype=_DTYPES[cargo.dtype], device=device)
    if tensor is not None:
        mine.copy_(tensor)
    dist.broadcast(mine, src=0)
    return mine
