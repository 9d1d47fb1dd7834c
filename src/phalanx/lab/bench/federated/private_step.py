"""What differential privacy adds to a training step of the same adapter: CPU time, the ways taking turns."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from phalanx.errors import ConfigError
from phalanx.lab.bench.federated.plan import FederatedPlan, make_federated_run
from phalanx.models import LoraConfig, ModelSource, open_model
from phalanx.parallel import ParallelConfig, RankEnv, RankTrainer, join_ranks
from phalanx.parallel.control.rank_trainer import RankRecipe
from phalanx.parallel.groups.mesh import open_domain
from phalanx.parallel.groups.rendezvous import own_device
from phalanx.parallel.privacy.trainer import PrivateRankTrainer
from phalanx.security.privacy import PrivacyConfig
from phalanx.train.setup.process import deterministic_kernels

NO_PRIVACY, WAYS = "none", ("none", "hooks", "ghost")
_NOISE, _WARM_UP = 1.0, 2


def private_rows(plan: FederatedPlan, cache: Path, directory: Path) -> list[dict[str, Any]]:
    """Return a row a way; null with the reason where Opacus is not there."""
    with deterministic_kernels(1), _lone_rank(directory) as rank:
        source = open_model(make_federated_run(plan, secure=False).model, cache / "models", 1)
        draw = torch.Generator().manual_seed(3)
        rows = torch.randint(0, source.vocab_size, (plan.private_rows, plan.length + 1), generator=draw)
        ids, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        trainers: dict[str, Callable[[int], object]] = {}
        reasons: dict[str, str] = {}
        for way in WAYS:
            try:
                trainer = _open_trainer(plan, way, source, rank)
            except ConfigError as exc:
                reasons[way] = str(exc)
                continue
            trainers[way] = lambda step, trainer=trainer: trainer.step(step, ids, labels)  # type: ignore[misc]
        return rows_of_steps(_take_turns(trainers, plan.private_steps), reasons)


def rows_of_steps(cpu_s: dict[str, list[float]], reasons: dict[str, str]) -> list[dict[str, Any]]:
    """Return a row a way; the ratio is the median over turns."""
    rows = []
    for way in WAYS:
        took = cpu_s.get(way)
        over = median(a / b for a, b in zip(took, cpu_s[NO_PRIVACY], strict=True)) if took else None
        rows.append(
            {
                "clipping": way,
                "cpu_s": median(took) if took else None,
                "over_none": over if way != NO_PRIVACY else None,
                "reason": reasons.get(way),
            }
        )
    return rows


def _take_turns(trainers: dict[str, Callable[[int], object]], steps: int) -> dict[str, list[float]]:
    cpu_s: dict[str, list[float]] = {way: [] for way in trainers}
    for step in range(steps + _WARM_UP):
        # each way is first in some turn
        for way in list(trainers) if step % 2 else reversed(list(trainers)):
            began = time.process_time()
            trainers[way](step)
            if step >= _WARM_UP:
                cpu_s[way].append(time.process_time() - began)
    return cpu_s


def _open_trainer(plan: FederatedPlan, way: str, source: ModelSource, rank: RankEnv) -> RankTrainer:
    run = make_federated_run(plan, secure=False)
    adapter = run.model.adapter
    if not isinstance(adapter, LoraConfig):
        raise TypeError("the bench trains LoRA")
    settings = {"epsilon": 8.0, "delta": 1e-5, "clip_norm": 1.0, "clipping": way}
    privacy = None if way == NO_PRIVACY else PrivacyConfig.model_validate(settings)
    # rows are not cut into microbatches, so that hooks and no hooks have the same matrices
    recipe = RankRecipe(
        parallel=ParallelConfig(),
        optimizer=run.optimizer,
        batch_size=plan.private_rows,
        microbatches=1,
        sequence_length=plan.length,
        total_steps=10**6,
        adapter=adapter,
        privacy=privacy,
    )
    domain = open_domain(recipe.parallel, own_device("cpu", rank))
    if way == NO_PRIVACY:
        return RankTrainer(recipe, source, domain)
    return PrivateRankTrainer(recipe, source, domain, _NOISE)


@contextlib.contextmanager
def _lone_rank(directory: Path) -> Iterator[RankEnv]:
    place = RankEnv(0, 1, 0, 1, directory / "rendezvous")
    with join_ranks(place, own_device("cpu", place), "00"):
        yield RankEnv(0, 1, 0, 1)
