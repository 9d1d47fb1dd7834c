"""The command, commit, machine and load of a raw result, for programs that run where the package is not installed."""

import os
import platform
import shutil
import subprocess
from pathlib import Path


def provenance(program: str, name: str) -> dict[str, object]:
    """Say how the result of a program of this folder is taken again.

    Args:
        program: Its file name.
        name: Of the result, without suffix.
    """
    return {
        "name": name,
        "command": f"python scripts/{program} > benchmarks/results/{name}.json",
        "commit": clean_commit(),
        "machine": {"platform": platform.platform(), "processor": platform.machine(), "cpus": os.cpu_count()},
        "load": list(os.getloadavg()),
    }


def clean_commit() -> str | None:
    """The commit of this file's tree; None where that has changes."""
    root, git = Path(__file__).resolve().parent.parent, shutil.which("git") or "git"
    said = [
        subprocess.run(  # noqa: S603 - our own command
            [git, *asked], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
        for asked in (("status", "--porcelain", "--untracked-files=no"), ("rev-parse", "HEAD"))
    ]
    return None if said[0] else said[1]
