"""One rank of the bench of saves: the state of a layout to disk and back, by each way."""

import contextlib
import gc
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from phalanx.checkpoint import Retention, Shard, make_folder, open_checkpoint, save_checkpoint, step_directory
from phalanx.config import StrictModel, digest_config
from phalanx.lab.bench.measure.harness import time_call
from phalanx.lab.bench.measure.resident import (
    added_at_peak,
    give_back_freed_memory,
    read_resident,
    reset_peak,
)
from phalanx.lab.bench.parallel.rank_host import Act
from phalanx.models import open_model
from phalanx.parallel import RankEnv, RankSaver, RankTrainer, join_ranks
from phalanx.parallel.data.parameters import local_slice
from phalanx.parallel.groups.mesh import open_domain
from phalanx.parallel.groups.rendezvous import own_device
from phalanx.pipeline import settle_numerics
from phalanx.security.crypto import Identity
from phalanx.train import DomainRun
from phalanx.train.sessions.domain import recipe_of

_RUN, _DIGEST, _STEPS = "bench", "00" * 32, 1

RANK0, PIECES, DCP = "through rank 0", "pieces of ranks", "torch DCP"
WAYS = (RANK0, PIECES, DCP)


class SaveSpec(StrictModel):
    """The state that ranks save: that of a run after one step.

    Attributes:
        cache: Directory in which the model is kept between calls.
        measures_memory: Freed memory goes back at once, so that peaks count living tensors alone; it costs time.
    """

    run: DomainRun
    cache: str
    measures_memory: bool = False


@contextlib.contextmanager
def open_saves(body: dict[str, Any], place: RankEnv) -> Iterator[Act]:
    """Join the others and save as ordered; see `phalanx.lab.bench.parallel.ranks.ArmRanks`."""
    spec = SaveSpec.model_validate_json(body["spec"])
    settle_numerics(spec.run.train.threads)
    if spec.measures_memory:
        give_back_freed_memory()
    with join_ranks(place, own_device("cpu", place), digest_config(spec.run)):
        yield _SavingRank(spec, place).run_order


class _SavingRank:
    """A rank with the state of one step, and the ways to save and restore it."""

    def __init__(self, spec: SaveSpec, place: RankEnv) -> None:
        run = spec.run
        source = open_model(run.model, Path(spec.cache) / "models", run.train.seed)
        recipe = recipe_of(run, run.parallel, source)
        domain = open_domain(recipe.parallel, own_device("cpu", place))
        self._member = RankTrainer(recipe, source, domain)
        self._rank = place.rank
        self._identity = Identity.without_certificate("bench")
        ids = torch.arange(run.train.batch_size * run.data.sequence_length).view(run.train.batch_size, -1) % 64
        # moments exist after a step
        self._member.train_step(0, ids, ids)
        self._saver = RankSaver(self._member, domain)
        self._saves: dict[str, Callable[[Path], object]] = {
            RANK0: self._save_through_rank0,
            PIECES: self._save_pieces,
            DCP: self._save_by_dcp,
        }

    def run_order(self, order: dict[str, Any]) -> dict[str, Any]:
        """Save and restore once.

        Args:
            order: ``way`` and ``directory``, which is empty and which all ranks share.

        Returns:
            ``save`` and ``restore`` with ``wall_s`` until the last rank was done, ``cpu_s`` and ``peak_bytes`` of this
            rank, and ``is_equal``: whether each number of this rank came back.
        """
        way, directory = order["way"], Path(order["directory"])
        before = self._digest_state()
        saved = self._measure(lambda: self._saves[way](directory))
        self._clear_state()
        is_cleared = self._digest_state() != before
        load = self._load_by_dcp if way == DCP else self._load_checkpoint
        restored = self._measure(lambda: load(directory))
        return {"save": saved, "restore": restored, "is_equal": is_cleared and self._digest_state() == before}

    def _measure(self, action: Callable[[], object]) -> dict[str, float]:
        gc.collect()
        reset_peak()
        before = read_resident()
        dist.barrier()
        started = time.perf_counter()
        cpu_s = time_call(action).cpu_s
        dist.barrier()
        return {"wall_s": time.perf_counter() - started, "cpu_s": cpu_s, "peak_bytes": added_at_peak(before)}

    def _save_through_rank0(self, directory: Path) -> None:
        shards = (Shard(n, self._member.collect_stage(n), _STEPS) for n in range(self._member.num_stages))
        if self._rank == 0:
            self._write_checkpoint(directory, shards)
            return
        for _ in shards:
            pass

    def _save_pieces(self, directory: Path) -> None:
        if self._rank == 0:
            make_folder(directory)
        dist.barrier()
        # the only one, which every rank sees
        (folder,) = directory.iterdir()
        self._saver.copy_contribution()
        if self._rank == 0:
            self._write_checkpoint(directory, self._saver.gather_pieces(folder, _STEPS))
            return
        self._saver.begin_writing(folder, _STEPS)
        self._saver.wait_until_sent()

    def _write_checkpoint(self, directory: Path, shards: Any) -> None:
        facts = {"run": _RUN, "config_digest": _DIGEST}
        save_checkpoint(directory, _STEPS, shards, facts, sign=self._identity, retention=Retention(1))

    def _save_by_dcp(self, directory: Path) -> None:
        state_dict_saver.save(self._state_by_key(), checkpoint_id=directory)

    def _load_checkpoint(self, directory: Path) -> None:
        checkpoint = None
        if self._rank == 0:
            path = directory / step_directory(_STEPS)
            checkpoint = open_checkpoint(path, self._identity.public, run=_RUN, config_digest=_DIGEST)
        for stage in range(self._member.num_stages):
            tensors = None
            if checkpoint is not None:
                tensors = {name: checkpoint.read_tensor(name) for name in self._member.tensor_names(stage)}
            self._member.load_stage(_STEPS, stage, tensors)

    def _load_by_dcp(self, directory: Path) -> None:
        state_dict_loader.load(self._state_by_key(), checkpoint_id=directory)

    def _state_by_key(self) -> dict[str, Tensor]:
        keys = [name for stage in self._member.state_catalogue() for name, _ in stage]
        return {keys[number]: value.detach() for number, _, value in self._member.held_state()}

    def _digest_state(self) -> str:
        digest = hashlib.sha256()
        for _, _, value in self._member.held_state():
            digest.update(local_slice(value).detach().contiguous().numpy().tobytes())
        return digest.hexdigest()

    @torch.no_grad()
    def _clear_state(self) -> None:
        for _, _, value in self._member.held_state():
            local_slice(value).zero_()
