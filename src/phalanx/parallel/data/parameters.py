"""The parameters of one rank: by name, with the ranks that share them, and whole again for a checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from phalanx.parallel.groups.mesh import Domain
from phalanx.parallel.model.part import StagePart
from phalanx.parallel.tensor.tensor_parallel import Split


@dataclass(frozen=True)
class RankParameter:
    """One parameter on this rank.

    Attributes:
        name: Name in the whole model.
        parameter: Trained tensor: a slice where tensor parallel ranks or copies share it.
        split: Cut among tensor parallel ranks; None where each has the whole.
        is_partial: Its gradient is one tensor parallel rank's part of the sum, although each rank has the parameter.
        is_second: The last stage's own copy of the embedding, which a tied head is.
        is_tied: This parameter has a copy at the other end of the pipeline.
    """

    name: str
    parameter: nn.Parameter
    split: Split | None
    is_partial: bool
    is_second: bool
    is_tied: bool


def held_parameters(part: StagePart, domain: Domain) -> list[RankParameter]:
    """Return the trained parameters of a part, after it was joined with its copies, in the order of the model."""
    stage = part.stage
    ends_apart = domain.config.pp > 1 and stage.ties_head
    blocks = f"{stage.family.trunk}.{stage.family.blocks}."
    last = tuple(f"{stage.family.trunk}.{name}." for name in stage.family.last_parts)
    parameters = []
    for name, parameter in stage.trainable_parameters().items():
        split = part.cut.splits.get(name)
        is_second = ends_apart and stage.spec.is_last and name == stage.family.head_weight
        is_sliced = domain.config.sequence_parallel and split is None and name.startswith((blocks, *last))
        is_embedding = ends_apart and stage.spec.is_first and name == stage.family.embedding_weight
        parameters.append(
            RankParameter(
                name=stage.family.embedding_weight if is_second else name,
                parameter=parameter,
                split=split,
                is_partial=is_sliced or name in part.cut.partial,
                is_second=is_second,
                is_tied=is_second or is_embedding,
            )
        )
    return parameters


def frozen_parameters(part: StagePart) -> list[RankParameter]:
    """Return the frozen parameters of a part beside an adapter; without gradients, so their sharing is left open."""
    return [
        RankParameter(name, parameter, part.cut.splits.get(name), is_partial=False, is_second=False, is_tied=False)
        for name, parameter in part.stage.all_parameters().items()
        if not parameter.requires_grad
    ]


def local_slice(tensor: Tensor) -> Tensor:
    """This rank's slice of a tensor that copies share; the tensor itself where they do not."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    return part.detach()


def settle_gradients(held: Sequence[RankParameter], domain: Domain) -> None:
    """After the copies have talked: complete what other ranks have parts of."""
    for entry in held:
        gradient = entry.parameter.grad
        if gradient is None:
            continue
        if entry.is_partial:
            dist.all_reduce(local_slice(gradient), group=domain.tensors)
        if entry.is_tied and domain.ends is not None:
            dist.all_reduce(local_slice(gradient), group=domain.ends)


def counted_gradients(held: Sequence[RankParameter], domain: Domain) -> Iterator[tuple[str, Tensor]]:
    """Slices of an island's whole gradient; over its ranks each number of it occurs once, and copies take turns."""
    for number, entry in enumerate(held):
        gradient = entry.parameter.grad
        if gradient is None or entry.is_second:
            continue
        shares = isinstance(entry.parameter, DTensor)
        alone_among_copies = (
            domain.replica == 0 if shares else number % domain.config.copies_per_island == domain.island_copy_index
        )
        alone_among_tensors = entry.split is not None or domain.tp == 0
        if alone_among_copies and alone_among_tensors:
            yield entry.name, local_slice(gradient)


def join_parameter(one: RankParameter, tensor: Tensor, domain: Domain) -> Tensor:
    """Join a parameter, or what belongs to it, from the ranks that share it; all of them call this together."""
    value = tensor.detach()
    full = value.full_tensor() if isinstance(value, DTensor) else value
    if one.split is None or domain.config.tp == 1:
        return full.cpu()
    slices = [torch.empty_like(full) for _ in range(domain.config.tp)]
    dist.all_gather(slices, full.contiguous(), group=domain.tensors)
    return one.split.join_slices(slices).cpu()


@torch.no_grad()
def fill_parameter(one: RankParameter, tensor: Tensor, full: Tensor, domain: Domain) -> None:
    """Copy this rank's slice of a whole tensor into a parameter, or into what belongs to it."""
    part = full if one.split is None else one.split.take_slice(full, domain.tp, domain.config.tp)
    if isinstance(tensor, DTensor):
        shared = distribute_tensor(part.to(domain.device), tensor.device_mesh, tensor.placements, src_data_rank=None)
        local_slice(tensor).copy_(shared.to_local())
    else:
        tensor.detach().copy_(part)


def group_by_name(held: Sequence[RankParameter]) -> Mapping[str, list[RankParameter]]:
    """Group this rank's parameters by their name in the whole model."""
    entries: dict[str, list[RankParameter]] = {}
    for entry in held:
        entries.setdefault(entry.name, []).append(entry)
    return entries
