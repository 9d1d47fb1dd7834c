"""The one table of kinds of evidence."""

from collections.abc import Mapping

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.amd.snp import SNP
from phalanx.security.tee.aws.nitro import NITRO
from phalanx.security.tee.azure.vtpm import AZ_SNP_VTPM
from phalanx.security.tee.claims import Backend
from phalanx.security.tee.evidence import Evidence
from phalanx.security.tee.intel.sgx import SGX
from phalanx.security.tee.intel.tdx import TDX
from phalanx.security.tee.nvidia.gpu import NV_GPU
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason
from phalanx.security.tee.sim import SIM
from phalanx.security.tee.tpm.quote import TPM

BACKENDS: Mapping[str, Backend] = {
    "snp": SNP,
    "tdx": TDX,
    "sgx": SGX,
    "nitro": NITRO,
    "tpm": TPM,
    "nv-gpu": NV_GPU,
    "az-snp-vtpm": AZ_SNP_VTPM,
    "sim": SIM,
}

_UNSUPPORTED = {
    "az-tdx-vtpm": "is of a confidential VM of Azure with TDX, whose hardware report holds the hash of its vTPM's "
    "keys and no nonce of ours; either half alone proves nothing of this session: take one with SEV-SNP (az-snp-vtpm)"
}
"""Kinds that others appraise, with the reason why nothing here does."""


def backend_of(kind: str) -> Backend:
    """Return what knows a kind of evidence."""
    backend = BACKENDS.get(kind)
    if backend is None:
        choices = f"known: {', '.join(BACKENDS)}"
        reason = _UNSUPPORTED.get(kind)
        detail = f"kind {kind[:40]!r}; {choices}" if reason is None else f"kind {kind!r} {reason}; {choices}"
        raise RefusedEvidenceError(RefusedEvidenceReason.UNKNOWN_KIND, detail)
    return backend


def inspect_evidence(evidence: Evidence) -> Mapping[str, str]:
    """Read measurements out of evidence without appraising it: for writing a policy, never for trusting."""
    return backend_of(evidence.kind).inspect(evidence)
