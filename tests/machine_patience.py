"""How long to wait for what must happen, on a machine that has other work as well."""

import os


def patience_s(alone_s: float, load: float | None = None) -> float:
    """Seconds to wait for what takes less than `alone_s` on a machine of its own.

    With more processes that want a processor than there are processors, each takes as many times longer. A bound only
    tells what hangs from what works; what is measured against the clock asks the clock itself.
    """
    waiting = os.getloadavg()[0] if load is None else load
    return alone_s * max(1.0, waiting / (os.cpu_count() or 1))
