"""``phalanx bench federated``: rounds of ours, of NVFlare and of Flower in turns; secure sums; privacy's price."""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from phalanx.errors import ConfigError, TrainingError
from phalanx.lab.bench.alone.secure_sum import measure_secure_sum as measure_sum
from phalanx.lab.bench.federated.arm import ALONE
from phalanx.lab.bench.federated.plan import (
    FederatedPlan,
    FederatedSpec,
    RoundsReport,
    RoundsRequest,
    SiteReport,
    make_federated_run,
    write_spec,
)
from phalanx.lab.bench.measure.harness import LineProcess, print_progress, scratch_directory, start_peer
from phalanx.lab.bench.measure.machine import load_average, result_context
from phalanx.lab.bench.measure.process_clock import marked_cpu_seconds
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
            trainers[way] = partial(trainer.train_step, ids=ids, labels=labels)
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


PEER_VARIABLE = "PHALANX_FL_PYTHON"
"""Names the Python of an environment with NVFlare, Flower, torch and PEFT; unset, the peers' figures are null."""

OURS, SECURE = "phalanx", "phalanx, secure sums"
PEERS = ("NVFlare simulator", "Flower simulation", "Flower deployment")
NAMES = (ALONE, OURS, SECURE, *PEERS)
_SAME_LOSS = 1e-4
_NO_PEER = f"no peers' Python: {PEER_VARIABLE} is not set"


def bench_federated(quick: bool) -> dict[str, Any]:
    """Measure rounds, a sum and a step; progress goes to standard error.

    Args:
        quick: Two layers, two turns of one round, and a sum of a million values.
    """
    quick_sizes = {"layers": 2, "turns": 2, "rounds": 1, "summed_values": 1_000_000, "private_steps": 4}
    plan = FederatedPlan.model_validate(quick_sizes if quick else {})
    return measure_federated(plan, os.environ.get(PEER_VARIABLE) or None) | {"quick": quick}


def measure_federated(plan: FederatedPlan, python: str | None) -> dict[str, Any]:
    """Let all arms take turns, then measure the single-process parts."""
    load = load_average()
    with scratch_directory() as directory:
        cache = Path(os.environ.setdefault("PHALANX_CACHE", str(directory / "cache"))).resolve()
        rows = _measure_rounds(plan, python, cache, directory)
        print_progress("a secure sum")
        summed = measure_sum(plan.summed_values, plan.summed_clients)
        print_progress("differential privacy")
        private = private_rows(plan, cache, directory)
    return {
        "name": "federated",
        "command": f"{PEER_VARIABLE}=PYTHON phalanx bench federated --json",
        **result_context([load, load_average()]),
        "plan": plan.model_dump(),
        "rows": rows,
        "secure_sum": {key: value for key, value in summed.items() if key != "mask_cpu_s_each"},
        "privacy": private,
    }


@dataclass
class RoundsArm:
    """A process that runs rounds on request, and its measurements.

    Attributes:
        cpu_s: Likewise, of all its processes.
        lines: Reports of all sites, one list a turn; the first turn warms up.
    """

    name: str
    version: str
    rounds: int
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    lines: list[list[SiteReport]] = field(default_factory=list)

    def training_s(self) -> list[float]:
        """For each measured turn, the time of the slowest site of each round."""
        numbers = [sorted({report.round for report in turn if report.round}) for turn in self.lines[1:]]
        return [
            sum(max(report.train_s for report in turn if report.round == number) for number in of_turn)
            for turn, of_turn in zip(self.lines[1:], numbers, strict=True)
        ]

    def losses_by_round(self) -> dict[int, float]:
        """Mean loss of the sites, by round."""
        losses_of_round: dict[int, list[float]] = {}
        for report in (report for turn in self.lines for report in turn):
            if report.loss is not None:
                losses_of_round.setdefault(report.round, []).append(report.loss)
        return {number: sum(losses) / len(losses) for number, losses in sorted(losses_of_round.items())}


class _RunningArm:
    """An arm with its process."""

    def __init__(
        self, name: str, shared: FederatedSpec, plan: FederatedPlan, python: str | None, stack: contextlib.ExitStack
    ) -> None:
        self._mark = f"PHALANX_BENCH_ARM={secrets.token_hex(8)}"
        directory = Path(shared.directory) / name.replace(",", "").replace(" ", "-")
        directory.mkdir()
        changes = {"directory": str(directory), "run": make_federated_run(plan, secure=name == SECURE)}
        path, log = directory / "spec.json", directory / "log"
        path.write_text(shared.model_copy(update=changes).model_dump_json(), encoding="utf-8")
        key, _, value = self._mark.partition("=")
        environment = {"OMP_NUM_THREADS": "1", key: value}
        if name in PEERS:
            program = str(Path(__file__).with_name("peers") / "fl_peer.py")
            process = start_peer(name, python or "", (program, str(path), name), environment, log)
        else:
            process = LineProcess(name, ("phalanx.lab.bench.federated.arm", str(path), name), environment, log)
        self._process = stack.enter_context(process)
        self.measured = RoundsArm(
            name, RoundsReport.model_validate_json(process.read_text()).version or "", plan.rounds
        )

    def take_turn(self) -> None:
        """Let it run some rounds; the first turn is not measured."""
        measured = self.measured
        used, began = marked_cpu_seconds(self._mark), time.perf_counter()
        report = self._process.ask(RoundsRequest(rounds=measured.rounds), RoundsReport)
        if measured.lines:
            measured.wall_s.append(time.perf_counter() - began)
            measured.cpu_s.append(marked_cpu_seconds(self._mark) - used)
        measured.lines.append([report_line for lines in report.sites.values() for report_line in lines])


def _measure_rounds(plan: FederatedPlan, python: str | None, cache: Path, directory: Path) -> list[dict[str, Any]]:
    shared, reasons = write_spec(plan, cache, directory), dict.fromkeys(PEERS, _NO_PEER)
    with contextlib.ExitStack() as stack:
        arms: dict[str, _RunningArm] = {}

        def attempt(name: str, turn: int | None) -> None:
            """Start an arm, or have it take a turn; a peer that fails is out, and its row says why."""
            try:
                if turn is None:
                    arms[name] = _RunningArm(name, shared, plan, python, stack)
                else:
                    arms[name].take_turn()
            except TrainingError as exc:
                if name not in PEERS:
                    raise
                reasons[name] = str(exc)
                arms.pop(name, None)

        for name in NAMES if python else (ALONE, OURS, SECURE):
            attempt(name, None)
            print_progress(f"{name}: {'is ready' if name in arms else reasons[name]}")
        for turn in range(plan.turns + 1):
            # each arm is first in some turn
            for name in list(arms) if turn % 2 else reversed(list(arms)):
                attempt(name, turn)
            print_progress(f"turn {turn + 1} of {plan.turns + 1}")
        return federated_rows({name: arm.measured for name, arm in arms.items()}, reasons)


def federated_rows(arms: Mapping[str, RoundsArm], reasons: Mapping[str, str]) -> list[dict[str, Any]]:
    """One row an arm, a round; medians over turns, within which all arms had the machine in its state."""
    expected, alone = arms[OURS].losses_by_round(), arms[ALONE]
    rows = []
    for name in NAMES:
        row: dict[str, Any] = {"arm": name, "version": None}
        row |= dict.fromkeys(("wall_s", "training_s", "over_training_s", "cpu_s", "cpu_over_training_s"))
        row |= dict.fromkeys(("bytes", "loads", "loads_after_first_turn", "largest_loss_difference", "reason"))
        rows.append(row)
        arm = arms.get(name)
        if arm is None:
            row["reason"] = reasons[name]
            continue
        rounds = arm.rounds
        row["version"] = arm.version
        row["wall_s"], row["cpu_s"] = median(arm.wall_s) / rounds, median(arm.cpu_s) / rounds
        if name == ALONE:
            continue
        trained, losses = arm.training_s(), arm.losses_by_round()
        differences = [abs(losses[number] - expected[number]) for number in expected]
        if max(differences) > _SAME_LOSS:
            raise TrainingError(f"bench federated: {name} learns something else: losses differ by {max(differences)}")
        row["training_s"] = median(trained) / rounds
        row["over_training_s"] = median(a - b for a, b in zip(arm.wall_s, trained, strict=True)) / rounds
        row["cpu_over_training_s"] = median(a - b for a, b in zip(arm.cpu_s, alone.cpu_s, strict=True)) / rounds
        row["bytes"] = median(sum(report.bytes for report in turn) for turn in arm.lines[1:]) / rounds
        row["loads"] = sum(report.load for report in arm.lines[0])
        row["loads_after_first_turn"] = sum(report.load for turn in arm.lines[1:] for report in turn)
        row["largest_loss_difference"] = max(differences)
    return rows
