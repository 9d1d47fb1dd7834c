"""The laboratory's rollout worker: ``python -m phalanx.lab.attacks.rollouts.worker KIND WORKER.toml``."""

import sys
from collections.abc import Sequence
from pathlib import Path

from phalanx.child import die_with_parent
from phalanx.config import load_config
from phalanx.errors import ConfigError, PhalanxError
from phalanx.lab.attacks.rollouts.table import make_liar
from phalanx.rollouts import RolloutWorkerConfig, run_rollout_worker


def main(arguments: Sequence[str]) -> int:
    """Run one liar to its end; returns the exit code, as ``phalanx rollout-worker`` does."""
    die_with_parent()
    try:
        if len(arguments) != 2:
            raise ConfigError("usage: python -m phalanx.lab.attacks.rollouts.worker KIND WORKER.toml")
        run_rollout_worker(load_config(Path(arguments[1]), RolloutWorkerConfig), make_liar(arguments[0]))
    except PhalanxError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
