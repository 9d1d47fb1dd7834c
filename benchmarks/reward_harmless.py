"""How often is a reward model right that has learned people's judgements of harmlessness?

``python benchmarks/reward_harmless.py RUN_DIR OUT.json`` reads a finished run of ``examples/reward_harmless.toml``.
"""

import math
import sys
from pathlib import Path

from finished_run import FinishedRun, arguments_of, write_result

from phalanx.align.safety import rate


def main() -> None:
    """Write one JSON object."""
    parser = arguments_of(__doc__)
    parser.add_argument("--held-out", type=int, required=True, help="pairs held out, as the run says when it begins")
    arguments = parser.parse_args()
    run = FinishedRun(Path("examples/reward_harmless.toml"), arguments.run_dir)
    found, pairs = run.summary["preferences"], arguments.held_out
    right = found["accuracy"] * pairs
    if abs(2 * right - round(2 * right)) > 1e-6:
        sys.exit(f"--held-out: {pairs} pairs do not give an accuracy of {found['accuracy']}")
    script = f"python benchmarks/reward_harmless.py RUN_DIR OUT.json --held-out {pairs}"
    result = run.facts("reward-harmless", script) | {
        "preferences": found,
        "interval": rate(math.floor(right), pairs),
        "loss": run.losses(),
    }
    write_result(arguments.out, result)


if __name__ == "__main__":
    main()
