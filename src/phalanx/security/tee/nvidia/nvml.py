"""Reports of NVIDIA GPUs in confidential mode, asked of the driver by NVIDIA's own bindings (extra ``nvidia``).

Tested against a driver that a test plays; the hardware path is not tested by us.

Source: NVIDIA, NVML API reference (confidential computing).
"""

import importlib
from collections.abc import Mapping
from typing import Any

from phalanx.errors import NoEvidenceError
from phalanx.security.tee.binding import Binding
from phalanx.security.tee.evidence import Evidence
from phalanx.security.tee.nvidia.spdm import without_padding


class NvmlAttester:
    """An attester that asks one GPU for an SPDM report with a binding as its nonce, and for its certificates."""

    kind = "nv-gpu"

    def __init__(self, index: int = 0, endorsements: Mapping[str, bytes] | None = None, nvml: Any = None) -> None:
        self._index, self._endorsements = index, dict(endorsements or {})
        self._nvml = nvml or _load_bindings()

    def make_evidence(self, binding: Binding) -> Evidence:
        """Have the GPU sign a binding.

        Raises:
            NoEvidenceError: There is no such GPU, it is not in confidential mode, or the driver refuses.
        """
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            try:
                gpu = nvml.nvmlDeviceGetHandleByIndex(self._index)
                report = nvml.nvmlDeviceGetConfComputeGpuAttestationReport(gpu, binding.binding_digest())
                chain = nvml.nvmlDeviceGetConfComputeGpuCertificate(gpu)
            finally:
                nvml.nvmlShutdown()
        except nvml.NVMLError as exc:
            raise NoEvidenceError(f"GPU {self._index}: {exc}; is it in confidential mode?") from exc
        return Evidence(
            self.kind,
            without_padding(bytes(report.attestationReport)[: report.attestationReportSize]),
            {"chain": bytes(chain.attestationCertChain)[: chain.attestationCertChainSize], **self._endorsements},
            binding,
        )


def has_confidential_gpu(nvml: Any = None) -> bool | None:
    """Whether the driver has its GPUs in confidential mode; None without a GPU, a driver that tells, or bindings."""
    try:
        bindings = nvml or _load_bindings()
    except NoEvidenceError:
        return None
    try:
        bindings.nvmlInit()
        try:
            if not bindings.nvmlDeviceGetCount():
                return None
            state = bindings.nvmlSystemGetConfComputeState()
        finally:
            bindings.nvmlShutdown()
    except (bindings.NVMLError, AttributeError):
        return None
    return bool(state.ccFeature)


def _load_bindings() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError as exc:
        raise NoEvidenceError("nv-gpu: NVIDIA's bindings are missing; pip install phalanx-train[nvidia]") from exc
