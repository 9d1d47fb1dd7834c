"""A domain's run on Ray: each rank in an actor that Ray places; when one is lost, all are placed and started again.

Rank 0 is placed on the machine where the command is given, because the run directory is there. A program that reaches
a Ray cluster can run code on all of its machines, as with torchrun: one cluster is one trust domain.
"""

import shlex
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from phalanx.config import dump_toml
from phalanx.errors import ConfigError
from phalanx.launch.child import LOST, Child, TerminationNotice, exit_code
from phalanx.launch.domain import DomainLaunch, StartSizes, rank_environment, threads_environment
from phalanx.launch.on_ray import connect_ray
from phalanx.launch.owner import is_worth_another
from phalanx.launch.worker_slot import LOOK_EVERY_S, EndNotice


@dataclass(frozen=True)
class ActorMachine:
    """The machine of an actor."""

    name: str
    address: str


class RankHost:
    """A host that starts, watches and ends the process of one rank."""

    def __init__(self) -> None:
        self._child = Child()
        self._directory = tempfile.TemporaryDirectory(prefix="phalanx-rank-")

    def machine(self) -> ActorMachine:
        """Where this is."""
        import ray  # noqa: PLC0415 - an extra

        return ActorMachine(ray.get_runtime_context().get_node_id(), str(ray.util.get_node_ip_address()))

    def free_port(self) -> int:
        """Return a port that no process on this machine uses at the moment."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            port: int = listener.getsockname()[1]
        return port

    def start(self, run_file: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the rank.

        Args:
            run_file: Text of the run file; this machine need not have it.
            arguments: Arguments of ``phalanx train`` after the run file.
            environment: Its place among the others.
        """
        path = Path(self._directory.name) / "run.toml"
        path.write_text(run_file, encoding="utf-8")
        self._child.start_command(("train", str(path), *arguments), environment)

    def poll(self) -> int | None:
        """Exit code, None while it runs, negative when it was killed."""
        return self._child.poll()

    def ask_to_end(self) -> None:
        """Let it stop in good order."""
        self._child.ask_to_end()


def rank_environments(machines: Sequence[ActorMachine], port: int) -> list[dict[str, str]]:
    """What tells each rank its place; ranks in the order of their machines.

    Args:
        port: Free on the machine of rank 0, where all of them meet.

    Ray shows each actor the one GPU that it was given, so every rank's own is the first one.
    """
    names = [machine.name for machine in machines]
    together = len(set(names)) == 1
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(machines)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": str(names.count(machine.name)),
            "MASTER_ADDR": "127.0.0.1" if together else machines[0].address,
            "MASTER_PORT": str(port),
        }
        for rank, machine in enumerate(machines)
    ]


_SOON_S = 15.0
"""How long a number of ranks is waited for when fewer would do."""
_PLACEMENT_TIMEOUT_S = 120.0
_LAST_WORDS_S = 5.0
_SECONDS_TO_END = 30.0
_HERE = 0.001
"""Of a machine's own resource, which is 1: enough to be placed there."""


def rank_bundles(launch: DomainLaunch, world: int, here: str | None = None) -> list[dict[str, float]]:
    """What each rank asks of the machine that it is placed on; rank 0 asks for the one at the address `here`."""
    train = launch.run_config.train
    bundle = {"CPU": float(train.threads)}
    if train.device.startswith("cuda"):
        bundle["GPU"] = 1.0
    first = bundle if here is None else {**bundle, f"node:{here}": _HERE}
    return [first, *(dict(bundle) for _ in range(world - 1))]


def describe_domain_ray(launch: DomainLaunch, address: str | None) -> list[str]:
    """Lines that say what would be run."""
    place = f"the cluster at {address}" if address else "a new cluster on this machine"
    lines = [f"ray: {place}; placement group PACK of {rank_bundles(launch, launch.rank_count)}, rank 0 on this machine"]
    return [*lines, f"each: phalanx train {shlex.join(launch.train_arguments())}"]


def run_domain_on_ray(launch: DomainLaunch, address: str | None) -> int:
    """Run all ranks in actors, and again when one is lost.

    On a running cluster the run begins with as many ranks as the run file allows and the cluster has room for. It goes
    on with fewer when a machine is lost, and with more, after the next checkpoint, when one has come.

    Args:
        address: Address of a running cluster for `ray.init`; None starts one on this machine for this run.
    """
    is_own = address is None
    policy = StartSizes(
        launch.allowed_sizes(), launch.rank_count if is_own else max(launch.allowed_sizes(), default=launch.rank_count)
    )
    restarts = launch.restart_limit
    with (
        connect_ray(address, launch.rank_count * launch.run_config.train.threads) as ray,
        TerminationNotice() as notice,
    ):
        while True:
            max_ranks = policy.next_size(launch.newest_checkpoint())
            fewer = [] if is_own else [size for size in launch.allowed_sizes() if size < max_ranks]
            with RayRanks(ray, launch, [max_ranks, *fewer]) as crew:
                code = crew.watch_ranks(notice)
            if code is None:
                typer.echo(f"launch: a machine joined; growing from {crew.world} ranks", err=True)
                continue
            if notice.notice_count or restarts == 0 or not is_worth_another(code):
                return exit_code(code)
            restarts -= 1
            typer.echo(f"launch: a rank ended with exit code {exit_code(code)}; all ranks restart", err=True)


class RayRanks:
    """All ranks of one start; a context manager that ends them.

    Args:
        sizes: Numbers of ranks that will do, most first; the first that finds room is taken.
    """

    def __init__(self, ray: Any, launch: DomainLaunch, sizes: list[int]) -> None:
        self._ray = ray
        self._launch = launch
        self._sizes = sizes
        self._stack = ExitStack()
        self._codes: dict[int, int] = {}
        self._questions: dict[int, Any] = {}
        self._actors: list[Any] = []
        self._newest = launch.newest_checkpoint()
        self._machines = self._count_machines()
        self.world = 0

    def __enter__(self) -> "RayRanks":
        try:
            self._start_ranks()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def watch_ranks(self, notice: EndNotice) -> int | None:
        """Watch until the run has ended, a rank is lost, or there should be more ranks.

        Returns:
            How it ended, 0 for a run that is complete; None where it should go on with more ranks.
        """
        num_notices = 0
        while True:
            self._read_answers()
            failed = [code for code in self._codes.values() if code]
            if failed:
                return self._ending_code(failed)
            if len(self._codes) == self.world:
                return 0
            if notice.notice_count > num_notices:
                num_notices = notice.notice_count
                self._ask_to_end()
            elif not notice.notice_count and self._should_grow():
                return None
            time.sleep(LOOK_EVERY_S)

    def _start_ranks(self) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415 - an extra

        ray, launch = self._ray, self._launch
        bundles, group = self._place_ranks()
        for index, bundle in enumerate(bundles):
            options = {
                "num_cpus": bundle["CPU"],
                "num_gpus": bundle.get("GPU", 0.0),
                "max_restarts": 0,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index),
            }
            actor = ray.remote(**options)(RankHost).remote()
            self._stack.callback(ray.kill, actor)
            self._actors.append(actor)
        try:
            machines = ray.get([actor.machine.remote() for actor in self._actors])
            port = ray.get(self._actors[0].free_port.remote())
        except ray.exceptions.RayActorError:
            self._codes[0] = LOST
            return
        text, (_, *arguments) = dump_toml(launch.run_config), launch.train_arguments()
        # overrides are in the text already
        arguments = arguments[arguments.index("--run-dir") :]
        arguments[1] = str(launch.run_dir.resolve())
        shared = {**rank_environment(go_on=True), **threads_environment(launch.run_config)}
        for actor, place in zip(self._actors, rank_environments(machines, port), strict=True):
            actor.start.remote(text, arguments, {**shared, **place})

    def _place_ranks(self) -> tuple[list[dict[str, float]], Any]:
        from ray.util.placement_group import placement_group, remove_placement_group  # noqa: PLC0415 - an extra

        here = str(self._ray.util.get_node_ip_address())
        for size in self._sizes:
            asked = rank_bundles(self._launch, size, here)
            group = placement_group(asked, strategy="PACK")
            if group.wait(_PLACEMENT_TIMEOUT_S if size == self._sizes[-1] else _SOON_S):
                self.world = size
                self._stack.callback(remove_placement_group, group)
                return asked, group
            remove_placement_group(group)
        raise ConfigError(
            f"the Ray cluster cannot place {self._sizes[-1]} ranks of {rank_bundles(self._launch, 1)[0]}, one of "
            f"them on {here}: it has {self._ray.available_resources()}; add machines, or lower parallel.min_dp"
        )

    def _read_answers(self) -> None:
        """Read the answers that have come, and ask the next question of the ranks that have answered."""
        for rank, actor in enumerate(self._actors):
            if rank in self._codes:
                continue
            if rank not in self._questions:
                self._questions[rank] = actor.poll.remote()
            question = self._questions[rank]
            ready, _ = self._ray.wait([question], timeout=0)
            if not ready:
                continue
            del self._questions[rank]
            try:
                code = self._ray.get(question)
            except self._ray.exceptions.RayActorError:
                code = LOST
            if code is not None:
                self._codes[rank] = code

    def _ending_code(self, failed: list[int]) -> int:
        """How the run ended: others end because the first one did, and may be heard of before it."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while len(self._codes) < self.world and time.monotonic() < deadline:
            self._read_answers()
            time.sleep(LOOK_EVERY_S)
        codes = [code for code in self._codes.values() if code]
        return next((code for code in codes if not is_worth_another(code)), failed[0])

    def _ask_to_end(self) -> None:
        """Ask rank 0 alone: the others end with it."""
        self._actors[0].ask_to_end.remote()
        deadline = time.monotonic() + _SECONDS_TO_END
        while 0 not in self._codes and time.monotonic() < deadline:
            self._read_answers()
            time.sleep(LOOK_EVERY_S)
        self._codes.setdefault(0, LOST)

    def _should_grow(self) -> bool:
        """Whether a machine has come and something was saved, so that little is lost by starting again."""
        larger = self.world < self._sizes[0]
        return larger and self._count_machines() > self._machines and self._launch.newest_checkpoint() > self._newest

    def _count_machines(self) -> int:
        return sum(1 for node in self._ray.nodes() if node["Alive"])
