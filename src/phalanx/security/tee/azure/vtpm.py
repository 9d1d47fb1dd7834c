"""A confidential VM of Azure with SEV-SNP: the chip vouches for a vTPM's key, and that key signs our binding.

The hardware report is made by the paravisor at VMPL 0 and holds the SHA-256 of its runtime data, the vTPM's
attestation key (AK) among it; the AK signs a quote with the binding in its qualifying data. The launch measurement is
that of Microsoft's paravisor, which every customer's machine has: what runs above it is in the PCRs alone, so a policy
names both.
"""

from collections.abc import Mapping
from dataclasses import replace

from pydantic import Field, field_validator

from phalanx.security.tee.amd.snp import SnpReference, appraise_snp, inspect_snp
from phalanx.security.tee.azure.hcl import attestation_key, check_runtime, parse_hcl_report
from phalanx.security.tee.claims import Backend, Claims, Reference
from phalanx.security.tee.evidence import Evidence
from phalanx.security.tee.formats.chain import Trust
from phalanx.security.tee.tpm.quote import check_quote, inspect_tpm

_OF_CHIP = ("vcek", "chain", "crl")


class AzSnpVtpmReference(SnpReference):
    """Reference values for Azure's confidential VMs with SEV-SNP.

    Measurements: ``launch`` and at least one PCR such as ``sha256.7``; the others of SEV-SNP where wanted.

    Attributes:
        max_vmpl: Always 0: the guest itself runs below, and could have a report made over a key of its own.
    """

    max_vmpl: int = Field(default=0, ge=0, le=0)

    @field_validator("measurements")
    @classmethod
    def _paravisor_and_system(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        if "launch" not in value or not any(name.startswith("sha256.") for name in value):
            raise ValueError("expected launch (the paravisor) and at least one PCR such as sha256.7 (what it started)")
        return value


def appraise_az_snp_vtpm(evidence: Evidence, reference: Reference, trust: Trust) -> Claims:
    """Appraise a quote of the vTPM (TPM2B_ATTEST followed by TPMT_SIGNATURE).

    Endorsements: ``hcl_report`` (NV index 0x01400001), ``pcrs`` as for ``tpm``, ``vcek`` and ``chain`` as for ``snp``,
    ``crl`` if wanted.
    """
    if not isinstance(reference, AzSnpVtpmReference):
        raise TypeError("appraise_az_snp_vtpm: expected AzSnpVtpmReference")
    evidence.check_names({"hcl_report", "pcrs", *_OF_CHIP})
    report = parse_hcl_report(evidence.find_endorsement("hcl_report"))
    below = {name: evidence.endorsements[name] for name in _OF_CHIP if name in evidence.endorsements}
    chip = appraise_snp(Evidence("snp", report.hardware, below), reference, trust)
    check_runtime(report.runtime, chip.report_data)
    quote, values = check_quote(evidence, attestation_key(report.runtime))
    note = "that the AK signs nothing but what its vTPM made rests on the paravisor, which the launch measurement names"
    return replace(
        chip,
        kind="az-snp-vtpm",
        measurements={**chip.measurements, **values},
        report_data=quote.extra_data,
        notes=(*chip.notes, note),
    )


def inspect_az_snp_vtpm(evidence: Evidence) -> Mapping[str, str]:
    """Read measurements without appraising anything."""
    report = parse_hcl_report(evidence.find_endorsement("hcl_report"))
    return {**inspect_snp(Evidence("snp", report.hardware)), **inspect_tpm(evidence)}


AZ_SNP_VTPM = Backend(AzSnpVtpmReference, appraise_az_snp_vtpm, inspect_az_snp_vtpm, packaged_roots=("amd_milan.pem",))
