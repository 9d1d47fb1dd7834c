"""The laboratory's worker: the production worker with its computations and messages changed from outside.

``python -m phalanx.lab.attacks.worker ATTACK.toml WORKER.toml``; ``phalanx worker`` cannot be told to attack.
"""

import functools
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from phalanx.child import die_with_parent
from phalanx.config import load_config, pin_own_code
from phalanx.errors import ConfigError, PhalanxError
from phalanx.lab.attacks.attack import Attack
from phalanx.lab.attacks.messages.message_attack import LyingRunner, MessageAttack
from phalanx.lab.attacks.start import AttackPlan
from phalanx.lab.attacks.states.gradient_attack import AlteringRunner, GradientAttack
from phalanx.lab.attacks.table import load_attack, make_actor, make_attack
from phalanx.parallel import find_place
from phalanx.pipeline import AttackConfig, StageRunner, WorkerConfig, WrapCopy, leave_unwrapped, run_worker
from phalanx.pipeline.worker.worker_file import load_worker
from phalanx.stage_group import Share, WrapShare, honest_share, open_group, run_group_rank
from phalanx.testing import RewritingEndpoint, WorkerCrash


def lying_rank(attack: Attack) -> WrapShare:
    """What makes a rank lie about its rows and positions, or about the weight gradients that it adds up.

    A rank knows no roles: it lies about what its party serves and about what its party recomputes for others.

    Args:
        attack: Attack on messages or on weight gradients, applied to this rank's piece.
    """
    if not isinstance(attack, MessageAttack | GradientAttack):
        raise ConfigError(
            f"attack.kind = {attack.config.kind!r} is on what rank 0 of a party has; take an attack on messages or on "
            "weight gradients, or leave the rank out"
        )

    def wrap(share: Share) -> Share:
        share.runner = _make_lying_runner(attack, share.runner)
        return share

    return wrap


def _make_lying_runner(attack: MessageAttack | GradientAttack, honest: StageRunner) -> StageRunner:
    return LyingRunner(honest, attack) if isinstance(attack, MessageAttack) else AlteringRunner(honest, attack)


_MODULE = "phalanx.lab.attacks.worker"


def run_attacker(plan: AttackPlan, config: WorkerConfig, kernels: WrapCopy = leave_unwrapped) -> None:
    """Run a worker as an attacker; one that crashes on purpose dies as by SIGKILL.

    Args:
        kernels: Wrapper of kernels, as in `run_worker`: an attacker lies about its computation, and shows honest
            kernels.
    """
    name, attack = _attack_of(plan, config)
    liar = make_actor(attack, name, _log_path(plan))
    try:
        opener = functools.partial(RewritingEndpoint, actor=liar)
        run_worker(config, kernels, opener, wrap_copy=liar.wrap_copy)
    except WorkerCrash:
        os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: Sequence[str]) -> int:
    """Run one attacker to its end; returns the exit code, as ``phalanx worker`` does."""
    die_with_parent()
    try:
        _run_plan(arguments)
    except PhalanxError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return exc.exit_code
    return 0


def _run_plan(arguments: Sequence[str]) -> None:
    if len(arguments) != 2:
        raise ConfigError("usage: python -m phalanx.lab.attacks.worker ATTACK.toml WORKER.toml")
    attack_file, worker_file = map(Path, arguments)
    plan = load_config(attack_file, AttackPlan, prepare=pin_own_code)
    config = load_worker(worker_file)
    load_attack(_attack_of(plan, config)[1], attack_file.parent if plan.home is None else Path(plan.home))
    if config.parallel.num_ranks == 1:
        run_attacker(plan, config)
        return
    name, attack = _attack_of(plan, config)
    liar = plan.ranks.get(name, 0)
    if not 0 <= liar < config.parallel.num_ranks:
        raise ConfigError(f"ranks.{name}: found {liar}; {name} has {config.parallel.num_ranks} ranks, counted from 0")
    lies = honest_share if liar == 0 else lying_rank(make_attack(attack, name, _log_path(plan)))
    place = find_place(os.environ)
    if place is not None and place.rendezvous is not None and not place.is_lead:
        run_group_rank(config, place, lies if place.rank == liar else honest_share)
        return
    with open_group(config, worker_file, (_MODULE, str(attack_file))) as group:
        if liar == 0:
            run_attacker(plan, config, group.wrap_copy)
        else:
            run_worker(config, group.wrap_copy)


def _attack_of(plan: AttackPlan, config: WorkerConfig) -> tuple[str, AttackConfig]:
    name = Path(config.identity).name
    if name not in plan.attackers:
        raise ConfigError(f"attackers: found {sorted(plan.attackers)}, not {name}; start it with `phalanx worker`")
    return name, plan.attackers[name]


def _log_path(plan: AttackPlan) -> Path | None:
    return None if plan.log is None else Path(plan.log)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
