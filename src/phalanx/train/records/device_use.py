"""What a step makes of its devices: seconds that it waited for data, memory, and the share of the peak (MFU)."""

import resource
import sys
import time

import torch

from phalanx.errors import ConfigError, ModelError
from phalanx.models.directory import describe_model
from phalanx.planner.cluster.catalog import known_devices
from phalanx.planner.model.compute import flops_utilization, model_flops
from phalanx.planner.model.read import shape_of
from phalanx.train.config import DomainRun, RunConfig

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


class DeviceUse:
    """Measures this process; of a domain that is rank 0, whose figures stand for all ranks.

    Args:
        run: Its device decides which memory is meant; a share of the peak is known where all ranks are GPUs of a kind
            in the planner's table, and where all weights are trained.
    """

    def __init__(self, run: RunConfig) -> None:
        self._on_gpu = run.train.device.startswith("cuda")
        self._ranks = run.parallel.num_ranks if isinstance(run, DomainRun) else 1
        self._peak = peak_of(torch.cuda.get_device_name(), run.train.precision) if self._on_gpu else None
        self._flops = _flops_of(run) if self._peak is not None and isinstance(run, DomainRun) else None
        self._begun_at = 0.0
        self._wait_s = 0.0

    def start_step(self) -> None:
        """A step begins: from here on it waits for its batch."""
        self._begun_at, self._wait_s = time.perf_counter(), 0.0

    def end_batch_wait(self) -> None:
        """A batch is there."""
        self._wait_s += time.perf_counter() - self._begun_at

    def restart_batch_wait(self) -> None:
        """A batch was given up: from here on the step waits for the next one."""
        self._begun_at = time.perf_counter()

    def usage_figures(self, tokens_per_s: float) -> dict[str, float]:
        """Return the figures of the step, by their names in ``metrics.jsonl``, without unknown ones."""
        figures = {"data_wait_s": self._wait_s, "peak_memory_bytes": float(self._peak_memory_bytes())}
        if self._flops is not None and self._peak is not None:
            figures["mfu"] = flops_utilization(tokens_per_s, self._flops, self._ranks, self._peak)
        return figures

    def _peak_memory_bytes(self) -> int:
        if self._on_gpu:
            return int(torch.cuda.max_memory_allocated())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT


def peak_of(name: str, precision: str) -> float | None:
    """Return a GPU's peak for dense products, in operations a second; None of a kind that no table has.

    Args:
        name: As the driver calls it, such as ``NVIDIA H100 80GB HBM3``.
    """
    words = set(name.upper().replace("-", " ").split())
    for device in known_devices().values():
        kind = next((word for word in device.title.upper().split() if any(map(str.isdigit, word))), None)
        if kind in words:
            return device.peak_flops("fp32" if precision == "fp32" else "fp16" if precision == "fp16" else "bf16")
    return None


def _flops_of(run: RunConfig) -> float | None:
    """Return operations that training takes for each token; None of adapters and of a model with unknown sizes."""
    described = describe_model(run.model)
    if described is None or run.model.adapter is not None:
        return None
    try:
        return model_flops(shape_of(described, "model config"), run.data.sequence_length)
    except (ConfigError, ModelError):
        return None
