"""Make every typical mistake once, each in a process of its own, and print the table of `docs/errors.md`.

``python scripts/mistakes.py``

The mistakes are those of `tests/cli/mistakes.py`, which a test holds to their exit codes and words.
"""

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "cli")]
from mistakes import MISTAKES, Mistake  # noqa: E402 - found beside the tests

_LONGEST = 300


def main() -> None:
    """Print the table, and the largest times."""
    sys.stdout.write("| command | mistake | message | exit | CPU s | wall s |\n|---|---|---|---|---|---|\n")
    times = []
    for mistake in MISTAKES:
        row, cpu = made(mistake)
        sys.stdout.write(row)
        sys.stdout.flush()
        times.append(cpu)
    times.sort()
    sys.stdout.write(f"\nCPU time: median {times[len(times) // 2]:.2f} s, largest {times[-1]:.2f} s\n")


def made(mistake: Mistake) -> tuple[str, float]:
    """One row, and its CPU time."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        taken = mistake.lay(home)
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        result = subprocess.run(  # noqa: S603 - our own interpreter and our own command
            [sys.executable, "-m", "phalanx", *mistake.command.split()],
            cwd=home,
            env={**os.environ, "PHALANX_CACHE": str(home / "cache"), "COLUMNS": "200", "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            check=False,
        )
        if taken is not None:
            taken.close()
        wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    words = re.sub(r"\s+", " ", re.sub(r"[│╭╮╰╯─]", " ", result.stderr)).strip().replace("|", "\\|")
    shown = words if len(words) <= _LONGEST else f"{words[:_LONGEST]} ..."
    command = f"`phalanx {mistake.command}`"
    return f"| {command} | {mistake.name} | {shown} | {result.returncode} | {cpu:.2f} | {wall:.2f} |\n", cpu


if __name__ == "__main__":
    main()
