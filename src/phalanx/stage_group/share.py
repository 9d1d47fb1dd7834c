"""One rank's share of a copy of a stage: its slices and rows, its tensors of the state, its part of every operation."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch import distributed as dist

from phalanx.models.family import MARKED_KINDS, join_marks, split_marks
from phalanx.parallel import ParallelConfig
from phalanx.parallel.context.ring import own_positions
from phalanx.parallel.data.parameters import fill_parameter, frozen_parameters, held_parameters
from phalanx.parallel.groups.collectives import gather_copies, keep_slice
from phalanx.parallel.groups.mesh import Domain
from phalanx.parallel.model.part import StagePart
from phalanx.pipeline import StageCopy, StageRunner, StepPlan
from phalanx.stage_group.orders import GroupCommand, broadcast_tensor
from phalanx.stage_group.state_shards import StateShards
from phalanx.stage_group.weight_gradients import JoinedGradients, SharedGradients, WeightGradients, whole_shape

_ROWS, _SEQUENCE_AXIS = 0, 1


def own_piece(whole: Tensor, domain: Domain) -> Tensor:
    """This rank's rows and positions of ``[batch, seq, dim]``."""
    return _slice_piece(whole, domain.config, domain.dp, domain.cp, domain.tp).contiguous()


def join_pieces(piece: Tensor, shape: tuple[int, ...], domain: Domain) -> Tensor | None:
    """Bring a tensor together at rank 0; all ranks call this together.

    Returns:
        The whole tensor, on the CPU; None on every other rank.
    """
    config, rank = domain.config, dist.get_rank()
    if config.num_copies * (config.tp if config.sequence_parallel else 1) == 1:
        return piece if rank == 0 else None
    if rank > 0:
        if domain.tp == 0 or config.sequence_parallel:
            dist.send(piece.to(domain.device).contiguous(), dst=0)
        return None
    full = torch.empty(shape, dtype=piece.dtype)
    # the number of every place, cut as the tensor was
    places = torch.arange(shape[_ROWS] * shape[_SEQUENCE_AXIS]).view(shape[:2])
    flat = full.view(-1, *shape[2:])
    for sender in range(config.num_ranks):
        copy, tp = divmod(sender, config.tp)
        if tp > 0 and not config.sequence_parallel:
            continue
        numbers = _slice_piece(places, config, *divmod(copy, config.cp), tp)
        came = piece
        if sender > 0:
            came = torch.empty((*numbers.shape, *shape[2:]), dtype=piece.dtype, device=domain.device)
            dist.recv(came, src=sender)
        flat[numbers.reshape(-1)] = came.cpu().reshape(-1, *shape[2:])
    return full


def _slice_piece(whole: Tensor, config: ParallelConfig, dp: int, cp: int, tp: int) -> Tensor:
    rows = whole.chunk(config.dp, _ROWS)[dp]
    positions = own_positions(rows, _SEQUENCE_AXIS, config, cp)
    return positions.chunk(config.tp, _SEQUENCE_AXIS)[tp] if config.sequence_parallel else positions


_GRADIENTS_SHARED, _SEQUENCE = 2, 1
Tensors = Mapping[str, Tensor]


class SlicedStage(StagePart):
    """A stage's slices, with the inputs and the parameters that a `StageRunner` has of a whole one."""

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """Run the slices on this rank's rows and positions, with the marks of attention behind them if it reads any.

        A mask is of whole rows, so that ranks tell each other of the marks in their positions.
        """
        if self.stage.attends not in MARKED_KINDS:
            return super().forward(x, seen)
        tensors, marks = self._domain.tensors, x[..., -1:].detach()
        marks = gather_copies(marks, _SEQUENCE, tensors) if self._cuts_sequence else marks
        marks = gather_copies(marks, _SEQUENCE, self._domain.context) if self._domain.config.cp > 1 else marks
        nothing, pattern = split_marks(marks, self.stage.attends, embeds=False)
        y = super().forward(x[..., :-1], pattern.prefix if pattern.documents is None else pattern.documents)
        local_marks = self._own_positions(join_marks(nothing, pattern)).contiguous()
        local_marks = keep_slice(local_marks, _SEQUENCE, tensors) if self._cuts_sequence else local_marks
        return torch.cat([y, local_marks], dim=-1)

    @property
    def shared_head(self) -> None:
        """Middle stages have no head."""

    def trainable_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return this rank's slices of the trained parameters."""
        return self.stage.trainable_parameters()


class Share:
    """The share that every rank of a group has of one copy; all ranks are given the same orders.

    Attributes:
        shards: This rank's tensors of the optimizer's state; None where rank 0 has all of it.
    """

    def __init__(self, plan: StepPlan, stage: int, domain: Domain) -> None:
        copy = StageCopy.build_empty(plan, stage, has_moments=False)
        self._domain = domain
        part = SlicedStage(copy.module, _domain_with_recompute(plan, domain))
        self._held = held_parameters(part, domain)
        self._frozen = frozen_parameters(part)
        self.runner: StageRunner = StageRunner(
            part,
            copy.spec,
            seed=plan.seed,
            precision=plan.precision,
            device=str(domain.device),
        )
        shared = domain.config.zero >= _GRADIENTS_SHARED
        joining = SharedGradients if shared else JoinedGradients
        self.gradients: WeightGradients = joining(self._held, domain)
        shapes = {entry.name: whole_shape(entry, domain) for entry in self._held}
        self.shards = StateShards(plan, shapes, domain.device) if domain.config.zero else None

    def run_order(self, order: GroupCommand, given: Tensors | None) -> dict[str, Tensor]:
        """Do this rank's part of an operation.

        Args:
            order: Order from rank 0.
            given: Rank 0's tensors for the order, by name; None on every other rank.
        """
        match order.operation:
            case "forward" | "backward" | "recompute":
                cargo = {
                    name: broadcast_tensor(None if given is None else given[name], description, self._domain.device)
                    for name, description in order.cargo.items()
                }
                return self._compute_order(order, cargo)
            case "gradients":
                self.gradients.hand_back()
                return self.gradients.collect_sums(self.runner.take_gradients())
            case "abandon":
                self.runner.abandon_step()
                self.gradients.clear_sums()
            case "weights":
                self._spread_weights(given, is_everywhere=False)
            case "frozen":
                self._hand_out(given)
            case _ if self.shards is not None:
                return self._keep_shards(self.shards, order, given)
            case _:
                raise TypeError(f"{order.operation}: rank 0 has the whole state")
        return {}

    def _compute_order(self, order: GroupCommand, cargo: Tensors) -> dict[str, Tensor]:
        pieces = {name: own_piece(tensor, self._domain) for name, tensor in cargo.items()}
        shape = next(iter(cargo.values())).shape
        results: dict[str, Tensor | None] = {}
        if order.operation == "forward":
            results["y"] = self.runner.forward(order.step, order.microbatch, pieces["x"])
        elif order.operation == "backward":
            results["x_gradient"] = self.runner.backward(order.step, order.microbatch, pieces["gradient"])
        else:
            results["y"], results["x_gradient"] = self.runner.recompute_microbatch(
                order.step, order.microbatch, pieces["x"], pieces.get("gradient")
            )
        joined = {
            name: join_pieces(piece, tuple(shape), self._domain) for name, piece in results.items() if piece is not None
        }
        return {name: tensor for name, tensor in joined.items() if tensor is not None}

    def _keep_shards(self, shards: StateShards, order: GroupCommand, given: Tensors | None) -> dict[str, Tensor]:
        """Read or change the state that the ranks keep together."""
        match order.operation:
            case "load":
                shards.load_shards(order.step, given)
            case "update":
                shards.update_shards(order.learning_rate, order.clip_coefficient, given or {})
                return self._spread_weights(None, is_everywhere=True)
            case "snapshot":
                shards.optimizer.keep_snapshot()
            case _:
                return shards.collect_state(order.names, order.source)
        return {}

    def _hand_out(self, weights: Tensors | None) -> None:
        """Give every rank its slices of the frozen weights, from rank 0, which has them whole."""
        for entry in self._frozen:
            full = torch.empty(
                whole_shape(entry, self._domain), dtype=entry.parameter.dtype, device=self._domain.device
            )
            if weights is not None:
                full.copy_(weights[entry.name].detach())
            dist.broadcast(full, src=0)
            fill_parameter(entry, entry.parameter, full, self._domain)

    def _spread_weights(self, weights: Tensors | None, *, is_everywhere: bool) -> dict[str, Tensor]:
        """Give every rank its slices of whole parameters, from the rank that has them.

        Args:
            weights: At rank 0, where they come from it.
            is_everywhere: They come from the ranks that keep them.

        Returns:
            The whole parameters that came from other ranks, at rank 0.
        """
        full_tensors = {}
        for entry in self._held:
            full = torch.empty(
                whole_shape(entry, self._domain), dtype=entry.parameter.dtype, device=self._domain.device
            )
            value = None if self.shards is None else self.shards.own_parameter(entry.name)
            source = value if is_everywhere else None if weights is None else weights[entry.name]
            if source is not None:
                full.copy_(source.detach())
            keeper = self.shards.keepers[entry.name] if is_everywhere and self.shards is not None else 0
            dist.broadcast(full, src=keeper)
            fill_parameter(entry, entry.parameter, full, self._domain)
            if value is not None and not is_everywhere:
                value.detach().copy_(full)
            if is_everywhere and dist.get_rank() == 0:
                full_tensors[entry.name] = full
        return full_tensors


def _domain_with_recompute(plan: StepPlan, domain: Domain) -> Domain:
    """The same place, where blocks are computed again in the backward pass if the run says so."""
    recompute = "full" if plan.activation_checkpointing else "none"
    return replace(domain, config=domain.config.model_copy(update={"activation_checkpointing": recompute}))
