"""This very machine as a cluster, measured in a fraction of a second."""

import os
import platform
import time

import numpy as np

from phalanx.planner.cluster.hardware import GIB, Cluster, Device, Pool

MICROBATCH_S = 1e-3
"""Cost of torch's pipeline for each microbatch and stage on a CPU, as measured in this project."""

_SIZE = 768
_SECONDS = 0.15


def this_machine(num_ranks: int | None = None) -> Cluster:
    """Return the CPU cores that this process may use, one rank each, with loopback between them.

    Args:
        num_ranks: Number of ranks that share the machine's memory and cores; None for one per core.

    Guarantees:
        The speed is measured now, with products of fp32 matrices; power and price stay unknown. The cores carry the
        bytes of exchanges themselves, so that nothing is hidden behind computation.
    """
    cores = len(os.sched_getaffinity(0))
    ranks = num_ranks or cores
    device = Device(
        title=f"{platform.machine()} core",
        memory_gib=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB / ranks,
        fp32_tflops=core_flops(cores) / 1e12,
    )
    return Cluster(
        title=f"{ranks} processes on this machine",
        pools=(Pool(device="core", count=ranks),),
        per_node=ranks,
        inside="loopback",
        between="loopback",
        efficiency=1.0,
        microbatch_s=MICROBATCH_S,
        overlap=False,
        cores=cores,
        device_is_host=True,
        devices={"core": device},
    )


def core_flops(cores: int) -> float:
    """Operations a second of one core in the best of several products on all threads that numpy may use."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    matrix = np.random.default_rng(0).standard_normal((_SIZE, _SIZE), dtype=np.float32)
    best, begun = 0.0, time.perf_counter()
    while time.perf_counter() - begun < _SECONDS:
        start = time.perf_counter()
        matrix @ matrix
        best = max(best, 2 * _SIZE**3 / (time.perf_counter() - start))
    return best / min(cores, int(threads) if threads.isdecimal() and int(threads) else cores)
