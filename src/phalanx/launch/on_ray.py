"""A run on a Ray cluster: the owner here, each worker in an actor that Ray places, and restarts on another machine.

A program that reaches a Ray cluster can run code on all of its machines: one cluster is one trust domain. Keys stay on
the disks of the machines and never enter Ray's object store.
"""

import os
import secrets
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from phalanx.errors import ConfigError
from phalanx.launch.child import TerminationNotice, exit_code
from phalanx.launch.owner import OwnerProcess
from phalanx.launch.request import Launch
from phalanx.launch.worker_slot import Configure, LocalWorkerHost, Substitutes, Supervisor, watch_owner
from phalanx.pipeline import WorkerConfig

_PLACEMENT_TIMEOUT_S = 120.0


class ActorWorkerHost(LocalWorkerHost):
    """A worker's place inside an actor."""

    def machine(self) -> str | None:
        """The address by which the cluster knows this machine."""
        import ray  # noqa: PLC0415 - an extra

        return str(ray.util.get_node_ip_address())


class RemoteWorkerHost:
    """The driver's end of an `ActorWorkerHost`: asks, and goes on without waiting for the answer."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor
        self._question: Any = None

    def start(self, name: str, config: WorkerConfig) -> None:
        """Start a worker; an actor that is being restarted starts it when it is back."""
        self._question = None
        self._actor.start.remote(name, config)

    def poll(self, name: str) -> int | None:
        """Exit code of the worker of this name, None while it runs or its actor is being restarted."""
        if self._question is None:
            self._question = self._actor.poll.remote(name)
        ready, _ = self._ray.wait([self._question], timeout=0)
        if not ready:
            return None
        question, self._question = self._question, None
        code: int | None = self._ray.get(question)
        return code


def worker_bundles(launch: Launch) -> list[dict[str, float]]:
    """What each worker asks of the machine that it is placed on."""
    train = launch.run_config.train
    bundle = {"CPU": float(train.threads)}
    if train.device.startswith("cuda"):
        bundle["GPU"] = 1.0
    return [bundle for _ in launch.run_config.pipeline.remote_workers]


def describe_ray(launch: Launch, address: str | None) -> list[str]:
    """Lines that say what would be run."""
    place = f"the cluster at {address}" if address else "a new cluster on this machine"
    lines = [f"ray: {place}; placement group SPREAD of {worker_bundles(launch)}"]
    pipeline = launch.run_config.pipeline
    lines += [
        f"actor: {name}: keys in {launch.keys_directory / name}, wherever it is placed"
        for name in pipeline.remote_workers
    ]
    lines += [f"replacements: {', '.join(pipeline.may_join) or 'none'}"]
    return [*lines, f"here: phalanx train {shlex.join(OwnerProcess(launch).owner_arguments())}"]


def run_on_ray(launch: Launch, address: str | None) -> int:
    """Run the owner as a process of this machine and the workers as actors.

    Args:
        launch: The owner's keys must be here, the workers' where Ray may place them.
        address: Address of a running cluster for `ray.init`; None starts one on this machine for this run.
    """
    if not launch.has_owner:
        raise ConfigError(f"--engine ray: the owner runs here, but {launch.keys_directory} lacks its keys")
    with open_cluster(launch, address) as ray, ExitStack() as stack:
        posts = [RemoteWorkerHost(ray, actor) for actor in _place_workers(ray, launch, stack)]
        pipeline, configure = launch.run_config.pipeline, _configure_in_actor(launch)
        substitutes = Substitutes(pipeline.may_join)
        keepers = [
            Supervisor(name, substitutes, host, configure)
            for name, host in zip(pipeline.remote_workers, posts, strict=True)
        ]
        owner = OwnerProcess(launch, str(ray.util.get_node_ip_address()))
        stack.callback(owner.kill)

        def tend(address: str | None) -> None:
            for keeper in keepers:
                keeper.check_worker(address)

        with TerminationNotice() as notice:
            code = watch_owner(owner, notice, tend, restarts=launch.restart_limit, renew=substitutes.refill_names)
        return exit_code(code)


def _configure_in_actor(launch: Launch) -> Configure:
    def configure(name: str, owner: str) -> WorkerConfig:
        config = launch.worker_config(name, owner)
        # Ray shows an actor the GPU that it was given as the only one; and the machine is another than this one
        return config.model_copy(update={"device": config.device.partition(":")[0], "advertise": None})

    return configure


@contextmanager
def connect_ray(address: str | None, processors: int) -> Iterator[Any]:
    """Ray, connected to a running cluster, or to one of its own that ends with the block.

    Args:
        address: Address for `ray.init`; None starts one on this machine.
        processors: That one of its own has: as many as are asked for, as `phalanx train` has.
    """
    # read when Ray is imported: nothing about this run is reported to the outside
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if address is None:
        # Ray listens on every interface: only processes that inherit this token may tell it what to run
        os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    try:
        import ray  # noqa: PLC0415 - an extra
        import ray.util  # noqa: PLC0415
    except ImportError as exc:
        raise ConfigError("--engine ray needs Ray; install the extra: pip install 'phalanx-train[ray]'") from exc
    if address is None:
        ray.init(address="local", num_cpus=processors, include_dashboard=False)
    else:
        ray.init(address=address)
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def open_cluster(launch: Launch, address: str | None) -> Iterator[Any]:
    """Open Ray for a run with stages in different hands."""
    with connect_ray(address, int(sum(bundle["CPU"] for bundle in worker_bundles(launch)))) as ray:
        machines = sum(1 for node in ray.nodes() if node["Alive"])
        if machines > 1 and launch.is_on_loopback:
            raise ConfigError(
                f"the Ray cluster has {machines} machines, but pipeline.transport.bind = "
                f"{launch.run_config.pipeline.transport.bind!r} is reachable from its own machine only; set it to "
                '"0.0.0.0"'
            )
        yield ray


def _place_workers(ray: Any, launch: Launch, stack: ExitStack) -> list[Any]:
    from ray.util.placement_group import placement_group, remove_placement_group  # noqa: PLC0415 - an extra
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415

    asked = worker_bundles(launch)
    group = placement_group(asked, strategy="SPREAD")
    stack.callback(remove_placement_group, group)
    if not group.wait(_PLACEMENT_TIMEOUT_S):
        raise ConfigError(
            f"the Ray cluster could not place {asked} within {_PLACEMENT_TIMEOUT_S:.0f} s, it has "
            f"{ray.available_resources()}; add machines, or lower train.threads or pipeline.stages"
        )
    actors = []
    for index, bundle in enumerate(asked):
        options = {
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0.0),
            "max_restarts": -1,
            # a question to an actor that is being restarted is answered when it is back
            "max_task_retries": -1,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index),
        }
        actors.append(ray.remote(**options)(ActorWorkerHost).remote())
    return actors
