"""The laboratory's worker: the production worker, and what it computes and sends is changed from outside.

``python -m phalanx.lab.attacks.worker ATTACK.toml WORKER.toml``; ``phalanx worker`` cannot be told to attack.
"""

import functools
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from phalanx.config import load_config
from phalanx.errors import ConfigError, PhalanxError
from phalanx.lab.attacks.start import AttackPlan
from phalanx.lab.attacks.table import actor
from phalanx.pipeline import WorkerConfig, WrapCopy, die_with_parent, run_worker, unwrapped
from phalanx.stage_group import open_group
from phalanx.testing import RewritingEndpoint, WorkerCrash


def run_attacker(plan: AttackPlan, config: WorkerConfig, kernels: WrapCopy = unwrapped) -> None:
    """Run a worker as an attacker; one that crashes on purpose dies as by SIGKILL.

    Args:
        plan: Says how it attacks, under the name of its identity.
        config: Its worker file.
        kernels: As in `run_worker`: an attacker lies about what it computes, and shows honest kernels.

    Raises:
        ConfigError: The plan has no attack for this party, or there is no such attack.
        PhalanxError: As `run_worker`.
    """
    name = Path(config.identity).name
    if name not in plan.attackers:
        raise ConfigError(f"attackers: found {sorted(plan.attackers)}, not {name}; start it with `phalanx worker`")
    liar = actor(plan.attackers[name], name, None if plan.log is None else Path(plan.log))
    try:
        opener = functools.partial(RewritingEndpoint, rewrite=liar.rewrite, hear=liar.hear)
        run_worker(config, kernels, opener, wrap_copy=liar.wrap_copy)
    except WorkerCrash:
        os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: Sequence[str]) -> int:
    """Run one attacker to its end; returns the exit code, as ``phalanx worker`` does."""
    die_with_parent()
    try:
        _run(arguments)
    except PhalanxError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return exc.exit_code
    return 0


def _run(arguments: Sequence[str]) -> None:
    if len(arguments) != 2:
        raise ConfigError("usage: python -m phalanx.lab.attacks.worker ATTACK.toml WORKER.toml")
    attack_file, worker_file = map(Path, arguments)
    plan, config = load_config(attack_file, AttackPlan), load_config(worker_file, WorkerConfig)
    if config.parallel.world == 1:
        run_attacker(plan, config)
        return
    # the other ranks are production workers: they compute for rank 0, and only rank 0 speaks
    with open_group(config, worker_file) as group:
        run_attacker(plan, config, group.wrap)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
