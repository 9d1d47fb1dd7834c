"""The table of attacks, and a worker process that carries one out when its file says so."""

from pathlib import Path

from phalanx.attacks.attacker import AttackedRunner
from phalanx.attacks.backward_gaussian import BackwardGaussian
from phalanx.attacks.forward_sign_flip import ForwardSignFlip
from phalanx.config import load_config
from phalanx.errors import ConfigError
from phalanx.pipeline import AttackConfig, StageRunner, WorkerConfig, WrapRunner, die_with_parent, run_worker

ATTACKS: dict[str, type[AttackedRunner]] = {
    "forward_sign_flip": ForwardSignFlip,
    "backward_gaussian": BackwardGaussian,
}


def attack_wrapper(config: AttackConfig, party: str, log: Path | None) -> WrapRunner:
    """Build what puts an attacker in the place of every stage that `party` serves.

    Raises:
        ConfigError: There is no such attack.
    """
    if config.kind not in ATTACKS:
        raise ConfigError(f"attack.kind: found {config.kind!r}; choices: none, {', '.join(sorted(ATTACKS))}")
    attack = ATTACKS[config.kind]

    def wrap(honest: StageRunner) -> StageRunner:
        return attack(honest, config, party, log)

    return wrap


def run_worker_with_attack(path: Path) -> None:
    """Run the worker of a worker file, as an attacker when the file has an `[attack]` section.

    Raises:
        ConfigError: The file is wrong.
        PhalanxError: As `run_worker`.
    """
    config = load_config(path, WorkerConfig)
    die_with_parent()
    if config.attack is None or config.attack.kind == "none":
        run_worker(config)
        return
    log = None if config.attack_log is None else Path(config.attack_log)
    run_worker(config, attack_wrapper(config.attack, Path(config.identity).name, log))
