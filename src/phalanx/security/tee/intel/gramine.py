"""SGX quotes, read from Gramine's pseudo-files inside an enclave.

Tested on a fixture tree; the hardware path is not tested by us.

Source: Gramine, Attestation and Secret Provisioning (/dev/attestation).
"""

from collections.abc import Mapping
from pathlib import Path

from phalanx.errors import NoEvidenceError
from phalanx.security.tee.binding import Binding
from phalanx.security.tee.evidence import Evidence

FOLDER = Path("dev/attestation")
_REPORT_DATA_BYTES = 64


class GramineAttester:
    """An attester that writes a binding and reads the quote over it; the files are the process's own."""

    kind = "sgx"

    def __init__(self, root: Path = Path("/"), endorsements: Mapping[str, bytes] | None = None) -> None:
        self._folder, self._endorsements = root / FOLDER, dict(endorsements or {})

    def make_evidence(self, binding: Binding) -> Evidence:
        """Have the enclave quoted over a binding.

        Raises:
            NoEvidenceError: This is no Gramine enclave, or it was built without DCAP attestation.
        """
        try:
            form = (self._folder / "attestation_type").read_text(encoding="ascii").strip()
            if form != "dcap":
                raise NoEvidenceError(
                    f"{self._folder}: attestation is {form[:20]!r}, expected sgx.remote_attestation = 'dcap'"
                )
            (self._folder / "user_report_data").write_bytes(binding.binding_digest().ljust(_REPORT_DATA_BYTES, b"\0"))
            quote = (self._folder / "quote").read_bytes()
        except OSError as exc:
            raise NoEvidenceError(
                f"{exc.filename or self._folder}: {exc.strerror}; is this a Gramine enclave?"
            ) from exc
        return Evidence(self.kind, quote, self._endorsements, binding)
