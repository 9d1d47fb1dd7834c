"""The machine that a run is watched on: processor, memory, disk, network, GPUs, and the use by the run's processes."""

import contextlib
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_MAX_GPUS = 16


@dataclass(frozen=True)
class GpuReading:
    """One look at a GPU.

    Attributes:
        busy_share: Share of the driver's last sample period in which a kernel ran.
    """

    busy_share: float
    memory_bytes: int
    memory_share: float


@dataclass(frozen=True)
class MachineReading:
    """One look at the machine.

    Attributes:
        cpu_share: Share of all cores since the last look.
        sent_per_s: Bytes a second that left over all network devices, loopback among them, since the last look.
        gpus: NVIDIA's, where their bindings are installed (extra ``nvidia``) and the driver answers.
    """

    cpu_share: float
    memory_share: float
    memory_bytes: int
    disk_free_bytes: int
    disk_share: float
    sent_per_s: float
    received_per_s: float
    gpus: tuple[GpuReading, ...] = ()


@dataclass(frozen=True)
class ProcessUse:
    """The use of this machine by all processes of a run together."""

    num_processes: int
    memory_bytes: int
    cpu_s: float


class MachineMeter:
    """Looks at the machine again and again; the first look has no rates.

    Args:
        nvml: NVIDIA's bindings; the installed ones if left out.
    """

    def __init__(self, nvml: Any = None) -> None:
        psutil.cpu_percent(None)
        self._nvml = _start_bindings(nvml or _load_bindings())
        self._last: tuple[float, int, int] | None = None

    def read_machine(self, run_dir: Path, now: float) -> MachineReading:
        """Return how the machine is.

        Args:
            run_dir: Directory on the disk that is measured.
            now: Seconds of a clock that never goes back.
        """
        memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(run_dir))
        counters = psutil.net_io_counters()
        # a machine without a network device has no counters
        sent, received = (0, 0) if counters is None else (counters.bytes_sent, counters.bytes_recv)
        last, self._last = self._last, (now, sent, received)
        rates = (0.0, 0.0)
        if last is not None and now > last[0]:
            rates = (max(0, sent - last[1]) / (now - last[0]), max(0, received - last[2]) / (now - last[0]))
        return MachineReading(
            cpu_share=psutil.cpu_percent(None) / 100,
            memory_share=memory.percent / 100,
            memory_bytes=memory.used,
            disk_free_bytes=disk.free,
            disk_share=disk.percent / 100,
            sent_per_s=rates[0],
            received_per_s=rates[1],
            gpus=tuple(self._read_gpus()),
        )

    def _read_gpus(self) -> list[GpuReading]:
        nvml, gpus = self._nvml, list[GpuReading]()
        if nvml is None:
            return []
        try:
            for index in range(min(nvml.nvmlDeviceGetCount(), _MAX_GPUS)):
                gpu = nvml.nvmlDeviceGetHandleByIndex(index)
                memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
                busy = nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
                gpus.append(GpuReading(busy, memory.used, memory.used / max(memory.total, 1)))
        except nvml.NVMLError:
            # a driver that has lost its devices is not asked again
            self._nvml = None
        return gpus


def _load_bindings() -> Any:
    with contextlib.suppress(ImportError):
        return importlib.import_module("pynvml")
    return None


def _start_bindings(nvml: Any) -> Any:
    """Return the bindings once a driver answers; None where there is none."""
    if nvml is not None:
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return None
    return nvml


def measure_processes(owner: int) -> ProcessUse | None:
    """Measure a run's process and its descendants; None where it has ended or is somebody else's."""
    num, memory_bytes, cpu_s = 0, 0, 0.0
    with contextlib.suppress(psutil.Error):
        lead = psutil.Process(owner)
        for process in [lead, *lead.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                memory_bytes += process.memory_info().rss
                cpu_s += sum(process.cpu_times()[:2])
                num += 1
    return ProcessUse(num, memory_bytes, cpu_s) if num else None
