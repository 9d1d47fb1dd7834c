"""Evidence of a confidential VM of Azure, asked of its vTPM: the paravisor's report, and a quote by the key in it.

The chip's certificates come from Azure's metadata service; nothing here opens a connection, so they are added.

Tested against swtpm with a report in its memory; the hardware path is not tested by us.

Source: Microsoft, guest attestation of confidential VMs (NV index 0x01400001, persistent key 0x81000003).
"""

from collections.abc import Iterable, Mapping

from phalanx.errors import TpmError
from phalanx.security.tee.binding import Binding
from phalanx.security.tee.evidence import Evidence
from phalanx.security.tee.tpm.attester import DEFAULT_PCRS, quote_binding
from phalanx.security.tee.tpm.device import TpmDevice

HCL_REPORT_INDEX, ATTESTATION_KEY = 0x01400001, 0x81000003


class AzureAttester:
    """An attester with the attestation key that the paravisor has made and the chip's report vouches for.

    Args:
        endorsements: ``vcek`` and ``chain`` of the chip.
    """

    kind = "az-snp-vtpm"

    def __init__(
        self, tpm: TpmDevice, pcrs: Iterable[int] = DEFAULT_PCRS, endorsements: Mapping[str, bytes] | None = None
    ) -> None:
        self._tpm, self._pcrs, self._endorsements = tpm, tuple(sorted(set(pcrs))), dict(endorsements or {})

    def make_evidence(self, binding: Binding) -> Evidence:
        """Have the vTPM sign a binding together with its PCRs.

        Raises:
            TpmError: There is no paravisor's report, or the vTPM refuses.
        """
        report = self._tpm.read_memory(HCL_REPORT_INDEX)
        quote, pcrs = quote_binding(self._tpm, ATTESTATION_KEY, self._pcrs, binding)
        return Evidence(self.kind, quote, {"hcl_report": report, "pcrs": pcrs, **self._endorsements}, binding)


def has_paravisor(tpm: TpmDevice) -> bool:
    """Whether a TPM is one of Azure's confidential VMs."""
    try:
        return bool(tpm.read_memory(HCL_REPORT_INDEX))
    except TpmError:
        return False
