"""Rank 0's end of a stage's group: starts the other ranks, and puts itself in the place of plain copies."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path

from torch import Tensor

from phalanx.config import digest
from phalanx.errors import ConfigError, PeerLostError
from phalanx.models import StageModule
from phalanx.parallel import LocalRanks, ParallelConfig, StepWorkload, check_layout, join
from phalanx.parallel.groups.mesh import Domain, open_domain
from phalanx.parallel.groups.rendezvous import own_device
from phalanx.pipeline import StageCopy, StepPlan, WorkerConfig, settle_numerics
from phalanx.stage_group.copy import GroupCopy
from phalanx.stage_group.orders import Cargo, Deed, GroupCommand, cargo_of, hand_round
from phalanx.stage_group.rank import LINE
from phalanx.stage_group.share import Share

_PATIENCE_S = 5.0
_ATTENTION_DROPOUT = ("attn_pdrop", "attention_dropout")


@contextlib.contextmanager
def open_group(config: WorkerConfig, file: Path) -> Iterator["StageGroup"]:
    """Start the other ranks of a worker and meet them; all of them end with this process.

    Args:
        config: The worker file's contents; `tensor_parallel` says how many ranks there are.
        file: The worker file, which the others read as well.

    Raises:
        PeerLostError: A rank ended, or did not come.
    """
    settle_numerics(config.threads)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-group-")))
        ranks = LocalRanks(directory, ("phalanx", "worker", str(file)), config.tensor_parallel, config.threads)
        listener = stack.enter_context(Listener(str(directory / LINE), "AF_UNIX"))
        stack.enter_context(ranks)
        ranks.start()
        place = ranks.place(0)
        device = own_device(config.device, place)
        stack.enter_context(join(place, device, digest(config), ranks.check))
        lines = [stack.enter_context(listener.accept()) for _ in range(1, place.world)]
        yield StageGroup(lines, open_domain(ParallelConfig(tp=place.world), device), ranks)


class StageGroup:
    """The ranks of one worker, as rank 0 has them.

    Args:
        lines: One to each of the other ranks.
        domain: Rank 0's place.
        ranks: The other ranks' processes.
    """

    def __init__(self, lines: Sequence[Connection], domain: Domain, ranks: LocalRanks) -> None:
        self._lines = lines
        self._domain = domain
        self._ranks = ranks
        self._shares: dict[int, Share] = {}
        self._dropped: list[int] = []
        self._num_built = 0

    def wrap(self, copy: StageCopy, held: bool) -> StageCopy:
        """Put the group in the place of a plain copy."""
        del held
        return copy if isinstance(copy, GroupCopy) else GroupCopy(copy, self)

    def build(self, plan: StepPlan, stage: int) -> int:
        """Have every rank make its share of a copy; returns the copy's number.

        Raises:
            ConfigError: The ranks cannot share this model.
        """
        check_plan(plan, self._domain.config.tp)
        copy_id, self._num_built = self._num_built, self._num_built + 1
        with self._together(
            GroupCommand(deed="build", copy_id=copy_id, stage=stage, plan=plan.model_dump(mode="json"))
        ):
            self._shares[copy_id] = Share(plan, stage, self._domain)
        return copy_id

    def drop(self, copy_id: int) -> None:
        """Note that a copy is no longer used: the ranks forget it before the next deed."""
        self._dropped.append(copy_id)

    def send_weights(self, copy_id: int, module: StageModule) -> None:
        """Give every rank its slices of these parameters."""
        with self._together(GroupCommand(deed="weights", copy_id=copy_id)):
            self._shares[copy_id].fill(module)

    def perform(
        self, copy_id: int, deed: Deed, step: int, microbatch: int, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Have a microbatch done by all ranks.

        Raises:
            PeerLostError: A rank has ended.
        """
        cargo: tuple[Cargo | None, ...] = tuple(cargo_of(tensor) for tensor in tensors)
        order = GroupCommand(deed=deed, copy_id=copy_id, step=step, microbatch=microbatch, cargo=cargo)
        with self._together(order):
            pairs = zip(tensors, cargo, strict=True)
            here = [hand_round(tensor, about, self._domain.device) for tensor, about in pairs]
            return self._shares[copy_id].perform(order, here)

    def gradients(self, copy_id: int) -> dict[str, Tensor]:
        """Collect whole weight gradients, by name."""
        with self._together(GroupCommand(deed="gradients", copy_id=copy_id)):
            return self._shares[copy_id].gradients()

    @contextlib.contextmanager
    def _together(self, order: GroupCommand) -> Iterator[None]:
        """Give the order, then do rank 0's part of it."""
        dropped, self._dropped = tuple(self._dropped), []
        for copy_id in dropped:
            del self._shares[copy_id]
        body = order.model_copy(update={"dropped": dropped}).model_dump_json().encode()
        try:
            for line in self._lines:
                line.send_bytes(body)
            yield
        except (RuntimeError, OSError) as exc:
            # gloo's word for a connection that was closed; the process that ended says more
            lost = self._ranks.find_lost(_PATIENCE_S)
            raise lost or PeerLostError(f"stage group: the ranks lost each other: {exc}") from exc


def check_plan(plan: StepPlan, ranks: int) -> None:
    """Refuse a run of which so many ranks cannot share a stage.

    Raises:
        ConfigError: Says why.
    """
    batch = plan.microbatch_size * plan.microbatches
    load = StepWorkload(batch, plan.microbatches, plan.sequence_length)
    check_layout(ParallelConfig(tp=ranks), plan.hub_config, load)
    if plan.adapter is not None:
        raise ConfigError(f"tensor_parallel = {ranks}: adapters are not cut yet; set it to 1 or train whole stages")
    if plan.guard.recovery == "skip_layer":
        raise ConfigError(f'tensor_parallel = {ranks}: mode "paper" compares bits of whole stages; set it to 1')
    for name in _ATTENTION_DROPOUT:
        if plan.hub_config.get(name):
            raise ConfigError(
                f"tensor_parallel = {ranks}: the model has {name} = {plan.hub_config[name]}, and ranks that have "
                "some of the heads drop other numbers than a whole stage does; set it to 0"
            )
