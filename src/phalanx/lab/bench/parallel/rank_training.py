"""One rank of one arm of a training bench: set up when it is first asked to work, then step by step."""

import contextlib
import gc
import importlib
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from phalanx.config import StrictModel, digest_config
from phalanx.data import BatchLoader
from phalanx.lab.bench.measure.resident import (
    Resident,
    ThreadSample,
    added_at_peak,
    give_back_freed_memory,
    read_resident,
    reset_peak,
)
from phalanx.lab.bench.measure.workloads import prepare_run
from phalanx.lab.bench.parallel.arms import ARMS, RankArm, RankSetup
from phalanx.lab.bench.parallel.rank_host import Act
from phalanx.parallel import RankEnv, join_ranks
from phalanx.parallel.deepspeed.extra import deepspeed_environment, load_package
from phalanx.parallel.groups.rendezvous import own_device
from phalanx.pipeline import keep_freed_memory, settle_numerics
from phalanx.train import DomainRun

_REHEARSED_NUMBERS = 2**20
_ACKED_OFFSET = 120
"""Of ``tcpi_bytes_acked`` in ``struct tcp_info``."""
_INFO_BYTES = 256


class TrainingSpec(StrictModel):
    """The training that the ranks of one arm do.

    Attributes:
        arm: One of `phalanx.lab.bench.parallel.arms.ARMS`.
        cache: Directory of models and tokens.
        measures_memory: Freed memory goes back at once, so that peaks count living tensors alone.
    """

    arm: str
    run: DomainRun
    cache: str
    measures_memory: bool = False


@contextlib.contextmanager
def open_training(body: dict[str, Any], place: RankEnv) -> Iterator[Act]:
    """Join the others and train as ordered; see `phalanx.lab.bench.parallel.ranks.ArmRanks`."""
    spec = TrainingSpec.model_validate_json(body["spec"])
    settle_numerics(spec.run.train.threads)
    if spec.measures_memory:
        give_back_freed_memory()
    else:
        keep_freed_memory()
    with join_ranks(place, own_device("cpu", place), digest_config(spec.run)):
        yield _Trainee(spec, place).run_order


class _Trainee:
    """A rank's arm, and the batches that it has seen."""

    def __init__(self, spec: TrainingSpec, place: RankEnv) -> None:
        self._spec = spec
        self._source, corpus = prepare_run(spec.run, Path(spec.cache))
        self._loader = BatchLoader(corpus, spec.run.train.batch_size, spec.run.train.seed)
        self._place = place
        self._arm: RankArm | None = None
        self._num_steps = 0
        self._before: Resident | None = None

    def run_order(self, order: dict[str, Any]) -> dict[str, Any]:
        """Make ``steps`` steps.

        Returns:
            ``losses`` of the whole batches, ``wall_s``, ``cpu_s`` (all threads of this rank) and ``waited_s`` of each
            step, ``sent_bytes`` of all steps where the system counts them, seconds by phase where the arm tells them,
            and the peak of memory where it is measured.
        """
        arm = self._open_arm()
        losses, walls, cpus, waits = [], [], [], []
        sent_before = read_sent_bytes()
        for _ in range(order["steps"]):
            batch = self._loader.next_batch()
            began, used = ThreadSample.sample_thread(), time.process_time()
            losses.append(arm.step_batch(self._num_steps, batch))
            cpus.append(time.process_time() - used)
            ended = ThreadSample.sample_thread()
            walls.append(ended.wall_s - began.wall_s)
            waits.append(ended.waited_since(began))
            self._num_steps += 1
        peak = None if self._before is None else added_at_peak(self._before)
        timed = {"wall_s": walls, "cpu_s": cpus, "waited_s": waits}
        sent_bytes = None if sent_before is None else (read_sent_bytes() or 0) - sent_before
        return {
            "losses": losses,
            **timed,
            "sent_bytes": sent_bytes,
            "phases": arm.take_phases(),
            "peak_bytes": peak,
        }

    def _open_arm(self) -> RankArm:
        if self._arm is None:
            if self._spec.measures_memory:
                _warm_libraries(adapts=self._spec.run.model.adapter is not None)
                if self._spec.run.deepspeed is not None:
                    with deepspeed_environment("cpu", self._place.local_rank):
                        load_package()
                self._before = read_resident()
            setting = RankSetup(self._spec.run, self._source, self._place)
            self._arm = ARMS[self._spec.arm](setting)
            gc.collect()
            if self._spec.measures_memory:
                # how a model is read from disk is not what is planned
                reset_peak()
        return self._arm


def _warm_libraries(*, adapts: bool) -> None:
    """Run every kind of operation once, so that libraries' own memory is allocated before the measurement."""
    if adapts:
        importlib.import_module("peft")
    model = nn.Sequential(nn.Embedding(64, 256), nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loss = nn.functional.cross_entropy(model(torch.zeros(512, dtype=torch.int64)), torch.zeros(512, dtype=torch.int64))
    torch.autograd.backward(loss)
    optimizer.step()
    numbers = torch.ones(_REHEARSED_NUMBERS)
    dist.all_reduce(numbers)
    del model, optimizer, loss, numbers
    gc.collect()


def read_sent_bytes() -> int | None:
    """Return the bytes that were sent and acknowledged on the connections that are open; None where none is counted.

    Source: tcp(7), ``TCP_INFO``; linux/tcp.h.
    """
    if not hasattr(socket, "TCP_INFO") or not os.path.isdir("/proc/self/fd"):
        return None
    return sum(_sent_on(int(number)) for number in os.listdir("/proc/self/fd"))


def _sent_on(number: int) -> int:
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return 0
        with socket.socket(fileno=os.dup(number)) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        # not TCP, or closed since
        return 0
    return int(struct.unpack_from("<Q", info, _ACKED_OFFSET)[0]) if len(info) >= _ACKED_OFFSET + 8 else 0
