"""Make every typical mistake once, each in a process of its own, and print the table of `docs/errors.md`.

``python scripts/mistakes.py [RESULT.json]``

The mistakes are those of `tests/cli/mistakes.py`, which a test holds to their exit codes and words.
"""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "cli")]
from mistakes import MISTAKES, Mistake  # noqa: E402 - found beside the tests

from phalanx.lab.bench.measure.machine import result_context  # noqa: E402

_LONGEST = 300


def main() -> None:
    """Print the table, and the largest times; write all of it as JSON where a file is named."""
    sys.stdout.write("| command | mistake | message | exit | CPU s | wall s |\n|---|---|---|---|---|---|\n")
    rows = []
    for mistake in MISTAKES:
        rows.append(made(mistake))
        sys.stdout.write(written(rows[-1]))
        sys.stdout.flush()
    times = sorted(row["cpu_s"] for row in rows)
    sys.stdout.write(f"\nCPU time: median {times[len(times) // 2]:.2f} s, largest {times[-1]:.2f} s\n")
    if len(sys.argv) > 1:
        header = {"name": "mistakes", "command": f"python {' '.join(sys.argv)}", **result_context(os.getloadavg()[0])}
        Path(sys.argv[1]).write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n")


def written(row: dict[str, Any]) -> str:
    """Return a row as the page has it."""
    words = row["message"].replace("|", "\\|")
    shown = words if len(words) <= _LONGEST else f"{words[:_LONGEST]} ..."
    times = f"{row['cpu_s']:.2f} | {row['wall_s']:.2f}"
    return f"| `{row['command']}` | {row['mistake']} | {shown} | {row['exit']} | {times} |\n"


def made(mistake: Mistake) -> dict[str, Any]:
    """Make one mistake, and return what it was told and what that cost."""
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
    words = re.sub(r"\s+", " ", re.sub(r"[│╭╮╰╯─]", " ", result.stderr)).strip()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "mistake": mistake.name,
        "command": f"phalanx {mistake.command}",
        "message": words.replace(f"{home}/", "").replace(str(home), "HOME"),
        "exit": result.returncode,
        "cpu_s": round(cpu, 3),
        "wall_s": round(wall, 3),
    }


if __name__ == "__main__":
    main()
