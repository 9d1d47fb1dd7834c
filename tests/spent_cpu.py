"""The processor time of this process and of all that it has started, living or ended.

Where other work shares the machine, a clock says how busy that was; the time on a processor says what a test costs.
"""

import os
from pathlib import Path


def _line(pid: str, proc: Path) -> tuple[int, float] | None:
    """The parent of a process, and the seconds of itself and of those that it has waited for."""
    try:
        text = (proc / pid / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # what follows the name, which may hold anything: state, parent, ..., and from the 12th on four times in ticks
    fields = text[text.rindex(")") + 2 :].split()
    return int(fields[1]), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def spent_s(root: int | None = None, proc: Path = Path("/proc")) -> float:
    """Seconds of a process, of its descendants, and of those that these have waited for."""
    lines = {int(name): line for name in os.listdir(proc) if name.isdecimal() and (line := _line(name, proc))}
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in lines.items():
        children.setdefault(parent, []).append(pid)
    total, left = 0.0, [os.getpid() if root is None else root]
    while left:
        pid = left.pop()
        total += lines[pid][1] if pid in lines else 0.0
        left += children.get(pid, [])
    return total
