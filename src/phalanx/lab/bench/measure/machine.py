"""The machine and the versions of a measurement."""

import hashlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch


def bench_head(name: str, load: float | None, *, quick: bool, commit: str | None = None) -> dict[str, Any]:
    """Return the head of every bench: its name, its command, and the machine.

    Args:
        name: Name in ``phalanx bench``.
        commit: At the beginning, where a bench is so long that the sources may have changed; now when left out.
    """
    command = f"phalanx bench {name} --json{' --quick' if quick else ''}"
    return {"name": name, "quick": quick, "command": command, **result_context(load, commit)}


def reproduce_head(table: str, size: str, load: float | None) -> dict[str, Any]:
    """Return the head of a reproduced table: its name, its size, its command, and the machine."""
    command = f"phalanx reproduce {table}{'' if size == 'full' else f' --{size}'}"
    return {"name": table, "quick": size == "quick", "size": size, "command": command, **result_context(load)}


def result_context(load: object, commit: str | None = None) -> dict[str, Any]:
    """Return machine, commit and load of a result."""
    return {"machine": describe_machine(), "commit": commit or current_commit(), "load": load}


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, memory and versions; None for facts that this system does not provide."""
    return {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "memory": f"{psutil.virtual_memory().total // 1024} kB",
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
    }


def load_average() -> float | None:
    """Processes that wanted to run during the last minute; above the cores' number, wall times say little."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def current_commit() -> str | None:
    """The commit of this source tree, marked when files differ from it; None outside a repository."""
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],  # noqa: S607
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def code_version() -> str:
    """The commit; where files differ from it or there is none, with a digest of the package's sources."""
    commit = current_commit()
    if commit is not None and not commit.endswith("-dirty"):
        return commit
    package = Path(__file__).parents[3]
    sources = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        sources.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return f"{commit or 'no commit'}+{sources.hexdigest()[:16]}"


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
