"""Ways to train one model on the same batches: the engine, one plain process, and its peers."""

from collections.abc import Callable
from typing import Protocol

from phalanx.data import Batch
from phalanx.lab.bench.measure.plain import PlainTrainer
from phalanx.lab.bench.parallel.peer_frameworks import AccelerateDdp, AccelerateFsdp, DeepSpeed
from phalanx.lab.bench.parallel.peer_pipeline import TorchPipeline
from phalanx.lab.bench.parallel.peers import RankSetup, TorchDdp, TorchFsdp, TorchZero1
from phalanx.parallel import RankTrainer
from phalanx.parallel.groups.mesh import open_domain
from phalanx.parallel.groups.rendezvous import own_device
from phalanx.train import step_inputs
from phalanx.train.sessions.domain import recipe_of

__all__ = ["ARMS", "PEERS", "RankArm", "RankSetup"]


class RankArm(Protocol):
    """One rank's way to make a step."""

    def step_batch(self, step: int, batch: Batch) -> float:
        """Make one optimizer step on a whole batch, which all ranks are given; return its mean loss in nats."""
        ...

    def take_phases(self) -> dict[str, float]:
        """Wall seconds by phase since the last call; empty where they are not known."""
        ...


class EngineArm:
    """A rank of engine `parallel`."""

    def __init__(self, setting: RankSetup) -> None:
        recipe = recipe_of(setting.run, setting.run.parallel, setting.source)
        domain = open_domain(recipe.parallel, own_device("cpu", setting.place))
        self._member = RankTrainer(recipe, setting.source, domain)

    def step_batch(self, step: int, batch: Batch) -> float:
        """Make one step."""
        return self._member.train_step(step, batch.input_ids, batch.labels).loss

    def take_phases(self) -> dict[str, float]:
        """Seconds by phase."""
        return self._member.timer.take_wall()


class AloneArm:
    """The un-sliced transformers model in one process, with torch's own optimizer."""

    def __init__(self, setting: RankSetup) -> None:
        self._microbatches = setting.run.train.microbatches
        self._trainer = PlainTrainer(setting.source, setting.run.optimizer, setting.run.train.steps)

    def step_batch(self, step: int, batch: Batch) -> float:
        """Make one step."""
        return self._trainer.train_step(step, step_inputs(batch, self._microbatches))

    def take_phases(self) -> dict[str, float]:
        """Nothing is timed."""
        return {}


ENGINE, ALONE = "phalanx", "plain torch, one process"
PEERS: dict[str, Callable[[RankSetup], RankArm]] = {
    "torch DDP": TorchDdp,
    "torch DDP + ZeroRedundancyOptimizer": TorchZero1,
    "torch FSDP2, parameters kept whole": lambda setting: TorchFsdp(setting, reshard=False),
    "torch FSDP2": lambda setting: TorchFsdp(setting, reshard=True),
    "torch pipelining, 1F1B": TorchPipeline,
    "accelerate DDP": AccelerateDdp,
    "accelerate FSDP2, parameters kept whole": lambda setting: AccelerateFsdp(setting, reshard=False),
    "accelerate FSDP2": lambda setting: AccelerateFsdp(setting, reshard=True),
    "DeepSpeed ZeRO 1": lambda setting: DeepSpeed(setting, stage=1),
    "DeepSpeed ZeRO 2": lambda setting: DeepSpeed(setting, stage=2),
    "DeepSpeed ZeRO 3": lambda setting: DeepSpeed(setting, stage=3),
}
ARMS: dict[str, Callable[[RankSetup], RankArm]] = {ENGINE: EngineArm, ALONE: AloneArm, **PEERS}
