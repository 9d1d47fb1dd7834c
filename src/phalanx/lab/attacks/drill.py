"""A worker process that carries out the attack in its worker file."""

import functools
import os
import signal
from pathlib import Path

from phalanx.errors import ConfigError
from phalanx.lab.attacks.table import actor
from phalanx.pipeline import WorkerConfig, WrapCopy, run_worker, unwrapped
from phalanx.testing import RewritingEndpoint, WorkerCrash


def run_worker_with_attack(config: WorkerConfig, kernels: WrapCopy = unwrapped) -> None:
    """Run a worker as an attacker; one that crashes on purpose dies as by SIGKILL.

    Args:
        config: Its `attack` says which one.
        kernels: As in `run_worker`: an attacker lies about what it computes, and shows honest kernels.

    Raises:
        ConfigError: There is no such attack.
        PhalanxError: As `run_worker`.
    """
    if config.attack is None:
        raise ConfigError("attack: the worker file has none; run it with run_worker")
    log = None if config.attack_log is None else Path(config.attack_log)
    liar = actor(config.attack, Path(config.identity).name, log)
    try:
        opener = functools.partial(RewritingEndpoint, rewrite=liar.rewrite, hear=liar.hear)
        run_worker(config, kernels, opener, wrap_copy=liar.wrap_copy)
    except WorkerCrash:
        os.kill(os.getpid(), signal.SIGKILL)
