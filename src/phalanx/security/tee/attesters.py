"""The attesters of this machine, by kind of evidence."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from phalanx.errors import NoEvidenceError, TpmError
from phalanx.security.tee import tsm
from phalanx.security.tee.aws import nsm
from phalanx.security.tee.aws.nsm import NsmAttester
from phalanx.security.tee.azure.attester import AzureAttester, has_paravisor
from phalanx.security.tee.intel import gramine
from phalanx.security.tee.intel.gramine import GramineAttester
from phalanx.security.tee.nvidia.nvml import NvmlAttester
from phalanx.security.tee.roles import Attester
from phalanx.security.tee.tpm.attester import DEFAULT_PCRS, TpmAttester
from phalanx.security.tee.tpm.device import open_tpm
from phalanx.security.tee.tpm.link import DEFAULT_ADDRESS
from phalanx.security.tee.tsm import TsmAttester

ATTESTED_KINDS = ("snp", "tdx", "sgx", "nitro", "az-snp-vtpm", "tpm", "nv-gpu")
"""Kinds of which this program can ask for evidence; never the simulation."""
_TPM_DEVICE = Path("dev/tpmrm0")


def find_kind(root: Path = Path("/")) -> str:
    """Return the strongest kind of evidence that this machine offers."""
    if (kind := tsm.provider_kind(root)) is not None:
        return kind
    for kind, path in (("nitro", nsm.DEVICE), ("sgx", gramine.FOLDER / "quote")):
        if (root / path).exists():
            return kind
    if (root / _TPM_DEVICE).exists():
        return "az-snp-vtpm" if _is_azures_tpm(root / _TPM_DEVICE) else "tpm"
    looked_for = ", ".join(str(path) for path in (tsm.REPORTS, nsm.DEVICE, gramine.FOLDER, _TPM_DEVICE))
    raise NoEvidenceError(f"this machine offers no evidence, or not to this user: none of {looked_for} is there")


@contextmanager
def open_attester(
    kind: str,
    endorsements: Mapping[str, bytes] | None = None,
    *,
    tpm: str = DEFAULT_ADDRESS,
    pcrs: tuple[int, ...] = DEFAULT_PCRS,
    root: Path = Path("/"),
) -> Iterator[Attester]:
    """Open what gives evidence of a kind; it is closed at the end.

    Args:
        kind: One of `ATTESTED_KINDS`.
        tpm: Address of the TPM, for ``tpm`` and ``az-snp-vtpm``.
    """
    match kind:
        case "snp" | "tdx":
            yield TsmAttester(kind, root, endorsements)
        case "sgx":
            yield GramineAttester(root, endorsements)
        case "nitro":
            yield NsmAttester(root)
        case "nv-gpu":
            yield NvmlAttester(endorsements=endorsements)
        case "az-snp-vtpm":
            with open_tpm(tpm) as device:
                yield AzureAttester(device, pcrs, endorsements)
        case "tpm":
            with open_tpm(tpm) as device, TpmAttester(device, pcrs, endorsements) as attester:
                yield attester
        case _:
            raise NoEvidenceError(
                f"kind {kind[:40]!r}: no evidence of it can be asked for; {', '.join(ATTESTED_KINDS)}"
            )


def _is_azures_tpm(device: Path) -> bool:
    try:
        with open_tpm(f"device:{device}") as tpm:
            return has_paravisor(tpm)
    except (TpmError, OSError):
        # not for this user
        return False
