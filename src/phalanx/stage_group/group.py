"""Rank 0's end of a stage's group: starts the other ranks, and puts itself in the place of plain copies."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path

from torch import Tensor

from phalanx.config import digest_config
from phalanx.errors import ConfigError, PeerLostError
from phalanx.models import LoraConfig, PrefixConfig, rows_before
from phalanx.parallel import LocalRanks, StepWorkload, check_layout, join_ranks
from phalanx.parallel.groups.mesh import Domain, open_domain
from phalanx.parallel.groups.rendezvous import own_device
from phalanx.pipeline import PartyLayout, StageCopy, StepPlan, WorkerConfig, settle_numerics
from phalanx.pipeline.party_layout import unshared_adapter
from phalanx.stage_group.copy import GroupCopy
from phalanx.stage_group.orders import GroupCommand
from phalanx.stage_group.rank import LINE, domain_config
from phalanx.stage_group.share import Share

_PATIENCE_S = 5.0
_ATTENTION_DROPOUT = ("attn_pdrop", "attention_dropout")
_HIDDEN_DROPOUT = ("resid_pdrop", "hidden_dropout", "dropout", "activation_dropout")


_COMMAND = ("phalanx", "worker")


@contextlib.contextmanager
def open_group(config: WorkerConfig, file: Path, command: Sequence[str] = _COMMAND) -> Iterator["StageGroup"]:
    """Start the other ranks of a worker and meet them; all of them end with this process.

    Args:
        config: The worker file's contents; `parallel` says how many ranks there are.
        command: Module and arguments of a rank, without the file; another than the default is for drills only.
    """
    layout = config.parallel
    settle_numerics(config.threads)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-group-")))
        ranks = LocalRanks(directory, (*command, str(file)), layout.num_ranks, config.threads, layout.silence_s)
        # all ranks connect before the first is admitted
        listener = stack.enter_context(Listener(str(directory / LINE), "AF_UNIX", backlog=layout.num_ranks))
        stack.enter_context(ranks)
        ranks.start_ranks()
        place = ranks.place_of(0)
        device = own_device(config.device, place)
        stack.enter_context(join_ranks(place, device, digest_config(config), ranks.check_all_run))
        lines = [stack.enter_context(listener.accept()) for _ in range(1, place.world)]
        yield StageGroup(lines, open_domain(domain_config(layout), device), ranks, layout)


class StageGroup:
    """The ranks of one worker, as rank 0 has them.

    Args:
        lines: One to each of the other ranks.
        domain: Rank 0's place.
    """

    def __init__(self, lines: Sequence[Connection], domain: Domain, ranks: LocalRanks, layout: PartyLayout) -> None:
        self._lines = lines
        self._domain = domain
        self._ranks = ranks
        self._layout = layout
        self._shares: dict[int, Share] = {}
        self._dropped: list[int] = []
        self._num_built = 0

    def wrap_copy(self, copy: StageCopy, held: bool) -> StageCopy:
        """Put the group in the place of a plain copy."""
        del held
        return copy if isinstance(copy, GroupCopy) else GroupCopy(copy, self)

    @property
    def shares_state(self) -> bool:
        """Whether the ranks keep the optimizer's state together."""
        return self._layout.zero > 0

    def build_copy(self, plan: StepPlan, stage: int) -> int:
        """Have every rank make its share of a copy; returns the copy's number."""
        check_plan(plan, self._layout)
        copy_id, self._num_built = self._num_built, self._num_built + 1
        with self._order_and_join(
            GroupCommand(operation="build", copy_id=copy_id, stage=stage, plan=plan.model_dump(mode="json"))
        ):
            self._shares[copy_id] = Share(plan, stage, self._domain)
        return copy_id

    def drop_copy(self, copy_id: int) -> None:
        """Note that a copy is no longer used: the ranks forget it before the next operation."""
        self._dropped.append(copy_id)

    def give_order(self, command: GroupCommand, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Have something done by all ranks.

        Raises:
            StaleReplicaError: A state is asked for that is not kept. Nothing was changed.
        """
        with self._order_and_join(command):
            return self._shares[command.copy_id].run_order(command, given)

    @contextlib.contextmanager
    def _order_and_join(self, order: GroupCommand) -> Iterator[None]:
        """Give the order, then do rank 0's part of it."""
        dropped, self._dropped = tuple(self._dropped), []
        for copy_id in dropped:
            del self._shares[copy_id]
        body = order.model_copy(update={"dropped": dropped}).model_dump_json().encode()
        try:
            for connection in self._lines:
                connection.send_bytes(body)
            yield
        except (RuntimeError, OSError) as exc:
            # gloo's word for a connection that was closed; the process that ended says more
            lost = self._ranks.find_lost(_PATIENCE_S)
            raise lost or PeerLostError(f"stage group: the ranks lost each other: {exc}") from exc


def check_plan(plan: StepPlan, layout: PartyLayout) -> None:
    """Refuse a run of which the ranks of a party cannot share a stage."""
    batch, adapter = plan.microbatch_size * plan.microbatches, plan.adapter
    load = StepWorkload(
        batch,
        plan.microbatches,
        plan.sequence_length,
        attention=plan.attention,
        attends=plan.effective_attention,
        adapted=adapter.targets if isinstance(adapter, LoraConfig) else None,
        has_prefix=isinstance(adapter, PrefixConfig),
        num_prompt_tokens=rows_before(adapter),
    )
    check_layout(domain_config(layout), plan.hub_config, load)
    for reason in _refusal_reasons(plan, layout):
        raise ConfigError(f"parallel: {layout.short_description}: {reason}")


def _refusal_reasons(plan: StepPlan, layout: PartyLayout) -> Iterator[str]:
    fault = unshared_adapter(plan.adapter)
    if fault is not None:
        yield fault
    if plan.privacy is not None:
        yield "[privacy]: each rank would clip a row by a part of its gradient in the stage; set the axes to 1"
    rows_apart = layout.num_copies > 1 or layout.sequence_parallel
    for name in (*_ATTENTION_DROPOUT, *(_HIDDEN_DROPOUT if rows_apart else ())):
        if plan.hub_config.get(name):
            yield (
                f"the model has {name} = {plan.hub_config[name]}, and ranks that have some of the heads, rows or "
                "positions drop other numbers than a whole stage does; set it to 0"
            )
