"""The worth of each tier, in the words that every banner and report uses."""

from collections.abc import Mapping

from phalanx.security.isolation import LABEL

_UNTESTED = "the hardware path is not tested by us"
TIERS: Mapping[str, str] = {
    "sim": "sim: NOT SECURE, a simulation proves nothing",
    "process": LABEL,
    "tpm": "tpm: proves identity and measured state, keeps no memory secret; a software TPM is in its host's hands",
    "snp": f"snp: memory is secret from the host (AMD SEV-SNP); {_UNTESTED}",
    "tdx": f"tdx: memory is secret from the host (Intel TDX); {_UNTESTED}",
    "sgx": f"sgx: memory is secret from the host (Intel SGX under Gramine); {_UNTESTED}",
    "nitro": f"nitro: memory is secret from the parent instance (AWS Nitro Enclaves), not from AWS; {_UNTESTED}",
    "nv-gpu": f"nv-gpu: the GPU's memory is secret from the host, beside a CPU's evidence only; {_UNTESTED}",
    "az-snp-vtpm": f"az-snp-vtpm: memory is secret from the host (SEV-SNP), its vTPM is Microsoft's; {_UNTESTED}",
}
"""By kind of evidence; `process` gives none."""
