"""The published evidence, each piece with a policy that it must pass and a clock of its time."""

import base64
import json
import os
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from phalanx.config import canonical_json
from phalanx.security.tee import BACKENDS, AppraisalResult, Evidence, Expected, Policy, RawReportData, appraise_evidence
from phalanx.security.tee.amd.snp import SnpReference
from phalanx.security.tee.aws.nitro import NitroReference
from phalanx.security.tee.azure.vtpm import AzSnpVtpmReference
from phalanx.security.tee.intel.sgx import SgxReference
from phalanx.security.tee.intel.tdx import TdxReference
from phalanx.security.tee.nvidia.gpu import NvGpuReference

VECTORS = Path(os.environ.get("PHALANX_VECTORS") or Path(__file__).resolve().parents[2] / "vectors")
_HELLO = b"Hello, world!".ljust(64, b"\0")


@dataclass(frozen=True)
class Case:
    """Evidence, what it is judged by, and when."""

    evidence: Evidence
    policy: Policy
    expected: Expected
    now: datetime

    def appraise(self) -> AppraisalResult:
        return appraise_evidence(self.evidence, self.policy, self.expected, self.now)

    def with_data(self, data: bytes) -> "Case":
        return replace(self, evidence=replace(self.evidence, data=data))

    def with_endorsement(self, name: str, data: bytes) -> "Case":
        return replace(self, evidence=replace(self.evidence, endorsements={**self.evidence.endorsements, name: data}))

    def with_reference(self, **changes) -> "Case":
        kind = self.evidence.kind
        reference = self.policy.references[kind]
        # through validation, so that a test cannot set what a policy file could not
        changed = type(reference).model_validate({**reference.model_dump(), **changes})
        return replace(self, policy=replace(self.policy, references={kind: changed}))

    def with_policy(self, **changes) -> "Case":
        return replace(self, policy=replace(self.policy, **changes))


def read(name: str) -> bytes:
    return (VECTORS / name).read_bytes()


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def measured(evidence: Evidence, *names: str) -> dict[str, tuple[str, ...]]:
    found = BACKENDS[evidence.kind].inspect(evidence)
    return {name: (found[name],) for name in names}


def snp() -> Case:
    data = bytes.fromhex(read("snp/report_milan.hex").decode().strip())
    evidence = Evidence("snp", data, {"vcek": read("snp/vcek_milan.der"), "chain": read("snp/cert_chain_milan")})
    reference = SnpReference(
        measurements=measured(evidence, "launch"),
        min_tcb={"bootloader": 3, "tee": 0, "snp": 8, "microcode": 115},
    )
    return Case(evidence, Policy({"snp": reference}), RawReportData(data[0x50:0x90]), moment("2024-01-01"))


def tdx() -> Case:
    evidence = Evidence("tdx", read("tdx/tdx_quote"), {"collateral": read("tdx/tdx_quote_collateral.json")})
    reference = TdxReference(measurements=measured(evidence, "mrtd", "rtmr0"))
    report_data = evidence.data[48 + 520 : 48 + 584]
    return Case(evidence, Policy({"tdx": reference}), RawReportData(report_data), moment("2025-06-20"))


def sgx() -> Case:
    evidence = Evidence("sgx", read("sgx/sgx_quote"), {"collateral": read("sgx/sgx_quote_collateral.json")})
    reference = SgxReference(
        measurements=measured(evidence, "mrenclave"), accepted_tcb=("UpToDate", "ConfigurationAndSWHardeningNeeded")
    )
    return Case(evidence, Policy({"sgx": reference}), RawReportData(_HELLO), moment("2025-06-20"))


def nitro() -> Case:
    evidence = Evidence("nitro", read("nitro/valid-attestation-doc-bytes"))
    start = evidence.data.index(b"enonceY") + 9
    reference = NitroReference(measurements=measured(evidence, "pcr0", "pcr1", "pcr2"))
    return Case(
        evidence,
        Policy({"nitro": reference}),
        RawReportData(evidence.data[start : start + 256]),
        moment("2022-10-13T09:30:00"),
    )


def nitro_debug() -> Case:
    evidence = Evidence("nitro", read("nitro/debug-mode-attestation-doc-bytes"))
    reference = NitroReference(measurements=measured(evidence, "pcr0"))
    return Case(evidence, Policy({"nitro": reference}), RawReportData(b"hello, world!"), moment("2022-10-12T14:30:00"))


def nv_gpu() -> Case:
    data = bytes.fromhex(read("nvidia/hopperAttestationReport.txt").decode().strip())
    evidence = Evidence("nv-gpu", data, {"chain": read("nvidia/hopper_cert_chain_case1.txt")})
    reference = NvGpuReference(measurements=measured(evidence, "2", "3", "4"), driver_versions=("550.90.07",))
    return Case(evidence, Policy({"nv-gpu": reference}), RawReportData(data[4:36]), moment("2025-01-01"))


def az_snp_vtpm() -> Case:
    sample = json.loads(read("azure/evidence-v2.json"))
    message, signature = (bytes.fromhex(sample["tpm_quote"][one]) for one in ("message", "signature"))
    data = len(message).to_bytes(2, "big") + message
    data += bytes.fromhex("0014000b") + len(signature).to_bytes(2, "big") + signature
    pcrs = {str(index): value for index, value in enumerate(sample["tpm_quote"]["pcrs"])}
    parts = {
        "hcl_report": base64.urlsafe_b64decode(sample["hcl_report"]),
        "pcrs": canonical_json({"sha256": pcrs}),
        "vcek": base64.urlsafe_b64decode(sample["vcek"]),
        "chain": read("snp/cert_chain_milan"),
    }
    evidence = Evidence("az-snp-vtpm", data, parts)
    reference = AzSnpVtpmReference(
        measurements=measured(evidence, "launch", "sha256.4", "sha256.7"),
        min_tcb={"bootloader": 4, "tee": 0, "snp": 24, "microcode": 219},
    )
    nonce = message[44:92]
    return Case(evidence, Policy({"az-snp-vtpm": reference}), RawReportData(nonce), moment("2025-06-20"))


PUBLISHED = {
    "snp": snp,
    "tdx": tdx,
    "sgx": sgx,
    "nitro": nitro,
    "nv-gpu": nv_gpu,
    "az-snp-vtpm": az_snp_vtpm,
}
