"""A check of this machine for missing, slow or wrongly configured parts. Nothing is changed or sent."""

import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import psutil

from phalanx.errors import NoEvidenceError, PhalanxError

if TYPE_CHECKING:
    import torch

DISTRIBUTION = "phalanx-train"
State = Literal["good", "notice", "bad"]

_GIB = 2**30
_SOON = timedelta(days=14)
_FEW_CORES, _LITTLE_MEMORY_GIB, _LITTLE_DISK_GIB = 4, 4, 5
_REPETITIONS = 10
_SLOW_RATIO = 4.0
"""From here on a data type is said to be slow beside float32."""
_TIMEX_BYTES, _TIME_ERROR = 512, 5
"""More than `struct timex` takes on any system, and what `adjtimex` returns for a clock that nothing corrects."""
_TRUSTED_HARDWARE = ("/dev/tpmrm0", "/dev/sev-guest", "/dev/tdx_guest", "/dev/nsm")


@dataclass(frozen=True)
class MachineFact:
    """One line of the check.

    Attributes:
        about: The checked part of the machine, in a word or two.
        state: Result of the check; with `bad` no run works.
        advice: Remedy, where there is one.
    """

    about: str
    state: State
    found: str
    advice: str = ""

    def as_row(self) -> dict[str, str]:
        """Return the finding by column."""
        return asdict(self)


def check_machine(directory: Path, identities: Sequence[Path] = ()) -> list[MachineFact]:
    """Look at this machine as a place to train.

    Args:
        identities: Directories with keys and certificates, as `phalanx pki` makes them.
    """
    findings = [finding for look in CHECKS.values() for finding in look(directory)]
    return findings + [_check_identity(path) for path in identities]


def _check_versions(_: Path) -> list[MachineFact]:
    import torch  # noqa: PLC0415 - seconds to import, and wanted here alone

    version = ".".join(map(str, sys.version_info[:3]))
    is_known = (3, 11) <= sys.version_info[:2] <= (3, 13)
    python = MachineFact(
        "python",
        "good" if is_known else "notice",
        version,
        "" if is_known else "tested with 3.11 and 3.12",
    )
    system = MachineFact(
        "system",
        "good" if sys.platform == "linux" else "notice",
        platform.platform(),
        "" if sys.platform == "linux" else "tested on Linux; on Windows use WSL 2; macOS cannot fork workers",
    )
    return [python, system, MachineFact("torch", "good", torch.__version__), *_check_devices()]


def _check_devices() -> list[MachineFact]:
    import torch  # noqa: PLC0415 - as above

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return [MachineFact("devices", "good", ", ".join(names), 'set train.device = "cuda" to use them')]
    if torch.version.cuda is None:
        return [MachineFact("devices", "good", "cpu", "this build of torch has no CUDA, which is right without a GPU")]
    advice = "this build of torch has CUDA but sees no device: check the driver (nvidia-smi)"
    return [MachineFact("devices", "notice", "cpu", advice)]


def _check_processors(_: Path) -> list[MachineFact]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    few = (
        ""
        if cores >= _FEW_CORES
        else "a pipeline of four stages uses one core for each: the stages will wait for each other"
    )
    busy = "" if load < cores else "other programs use this machine: runs are slower"
    return [
        MachineFact("cores", "notice" if few else "good", str(cores), few),
        MachineFact("load", "notice" if busy else "good", f"{load:.1f}", busy),
    ]


def _check_memory(_: Path) -> list[MachineFact]:
    available = psutil.virtual_memory().available / _GIB
    is_little = available < _LITTLE_MEMORY_GIB
    advice = "a process uses about 0.5 GiB before it loads weights; lower pipeline.stages" if is_little else ""
    return [MachineFact("memory", "notice" if is_little else "good", f"{available:.1f} GiB available", advice)]


def _check_disk(directory: Path) -> list[MachineFact]:
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        why = "cannot be written" if existing.is_dir() else "is a file"
        return [MachineFact("disk", "bad", f"{existing} {why}", "choose another place with --run-dir")]
    free = shutil.disk_usage(existing).free / _GIB
    is_little = free < _LITTLE_DISK_GIB
    advice = "a checkpoint needs 12 bytes for each trained number; lower checkpoint.keep" if is_little else ""
    return [MachineFact("disk", "notice" if is_little else "good", f"{free:.1f} GiB free at {existing}", advice)]


def _check_kernels(_: Path) -> list[MachineFact]:
    """Time one product in float32 and in bfloat16: on many processors the smaller type is the slower one."""
    import torch  # noqa: PLC0415 - as above

    capability = torch.backends.cpu.get_cpu_capability()
    fast, slow = (_product_s(torch.randn(512, 512).to(kind)) for kind in (torch.float32, torch.bfloat16))
    ratio = slow / fast
    advice = "train in fp32 on this CPU: bf16 is emulated" if ratio > _SLOW_RATIO else ""
    description = f"bf16 products take {ratio:.2g} times as long as fp32 ({capability})"
    return [MachineFact("kernels", "notice" if advice else "good", description, advice)]


def _product_s(x: "torch.Tensor") -> float:
    """Return the processor seconds of one product; the first ones make kernels and threads ready."""
    taken = []
    for _ in range(_REPETITIONS):
        begin = time.process_time()
        x @ x
        taken.append(time.process_time() - begin)
    return max(min(taken), time.get_clock_info("process_time").resolution)


def _check_extras(_: Path) -> list[MachineFact]:
    """Look which extras are complete; the list is the package's own."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return [MachineFact("extras", "notice", "unknown", f"{DISTRIBUTION} is not installed; only its files exist")]
    missing: dict[str, list[str]] = {}
    for requirement in requirements:
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        name = re.match(r"[\w.-]+", requirement)
        if extra is not None and name is not None:
            missing.setdefault(extra[1], []).extend([] if _is_installed(name[0]) else [name[0]])
    installed = [extra for extra, lacks in missing.items() if not lacks]
    absent = [extra for extra, lacks in missing.items() if lacks]
    advice = f"pip install '{DISTRIBUTION}[NAME]' for one of {', '.join(sorted(absent))}" if absent else ""
    return [MachineFact("extras", "good", ", ".join(sorted(installed)) or "none", advice)]


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _check_network(_: Path) -> list[MachineFact]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5.0):
                return [MachineFact("network", "good", "ports of the loopback address work")]
    except OSError as exc:
        return [MachineFact("network", "bad", f"loopback: {exc}", "stages talk over TCP: let this program open ports")]


def _check_clock(_: Path) -> list[MachineFact]:
    """Ask the kernel whether anything corrects its clock: certificates and tokens have dates."""
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return [MachineFact("clock", "notice", now, "this system does not report whether the clock is synchronised")]
    if state == _TIME_ERROR:
        return [
            MachineFact(
                "clock",
                "notice",
                now,
                "no service synchronises the clock (NTP); the validity of certificates depends on it",
            )
        ]
    return [MachineFact("clock", "good", now)]


def _trusted_hardware(_: Path) -> list[MachineFact]:
    from phalanx.security.tee import TIERS, find_kind  # noqa: PLC0415 - it has more parsers than any other check

    devices = [path for path in _TRUSTED_HARDWARE if Path(path).exists()]
    unreadable = [path for path in devices if not os.access(path, os.R_OK | os.W_OK)]
    if unreadable:
        return [
            MachineFact("attestation", "notice", ", ".join(devices), f"no permission to use {', '.join(unreadable)}")
        ]
    try:
        kind = find_kind()
    except NoEvidenceError:
        simulator = (
            "a software TPM is available for tests" if shutil.which("swtpm") else "swtpm is not installed either"
        )
        advice = 'a [split] falls back to tier = "process", which hides nothing from the administrator of this machine'
        hardware = f"no SEV-SNP, TDX, Nitro or SGX enclave, and no TPM; {simulator}"
        return [MachineFact("attestation", "notice", hardware, advice), *_confidential_gpu()]
    return [MachineFact("attestation", "good", TIERS[kind]), *_confidential_gpu()]


def _confidential_gpu() -> list[MachineFact]:
    """Report whether an NVIDIA GPU encrypts its memory; an empty list without a GPU."""
    from phalanx.security.tee import TIERS, has_confidential_gpu  # noqa: PLC0415 - as above

    is_confidential = has_confidential_gpu()
    if is_confidential is None:
        return []
    if is_confidential:
        return [MachineFact("GPU attestation", "good", TIERS["nv-gpu"])]
    return [MachineFact("GPU attestation", "notice", "the GPU is not in confidential mode: its host reads its memory")]


def _check_identity(directory: Path) -> MachineFact:
    from phalanx.security.crypto import (  # noqa: PLC0415 - wanted only with certificates
        certificate_facts,
        load_identity,
        steady_now,
    )

    topic = f"identity {directory}"
    try:
        identity = load_identity(directory)
        expires_at = certificate_facts(identity.certificate_pem, topic).not_after
    except PhalanxError as exc:
        return MachineFact(topic, "bad", str(exc), f"phalanx explain {exc.error_facts['code']}")
    description = f"{identity.name}: keys and certificate belong together, valid until {expires_at.isoformat()}"
    if expires_at - steady_now() > _SOON:
        return MachineFact(topic, "good", description)
    return MachineFact(topic, "notice", description, "get a new one with phalanx pki sign, or issue, before it expires")


CHECKS: Mapping[str, Callable[[Path], list[MachineFact]]] = MappingProxyType(
    {
        "versions": _check_versions,
        "processors": _check_processors,
        "memory": _check_memory,
        "disk": _check_disk,
        "kernels": _check_kernels,
        "extras": _check_extras,
        "network": _check_network,
        "clock": _check_clock,
        "trusted hardware": _trusted_hardware,
    }
)
