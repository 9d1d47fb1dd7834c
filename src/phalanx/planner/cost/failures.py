"""The cost of failures: how often to save, and the share of the time that is left."""

import math


def device_to_cluster_mtbf(device_mtbf_s: float, num_devices: int) -> float:
    """Mean time between failures of a cluster that stops when any device does, in seconds."""
    return device_mtbf_s / num_devices


def daly_interval(save_s: float, mtbf_s: float) -> float:
    """Seconds of work between two checkpoints, by the higher order estimate. Source: Daly 2006, equation 37."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def goodput(interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Share of the time in which work is done that lasts, for failures that come at random.

    Args:
        interval_s: Work between two checkpoints.
        save_s: How long a checkpoint stops the work.
        restart_s: From a failure until work goes on.
        mtbf_s: Mean time between failures of the whole cluster.

    Source: Daly 2006, equation 13: exponentially distributed failures, which strike while saving and restarting too.
    """
    exponent = (interval_s + save_s) / mtbf_s
    if exponent + restart_s / mtbf_s > math.log(1e300):
        return 0.0
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent))
