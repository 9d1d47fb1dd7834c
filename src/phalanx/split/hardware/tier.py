"""The tiers of an enclave: what attests it, what keeps its key, and what counts its states."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from phalanx.security.crypto import Identity, make_private_directory, read_private, write_private
from phalanx.security.seal import EpochStore, MonotonicCounter, NotRollbackProofCounter
from phalanx.security.tee import TIERS, Attester, SimAttester
from phalanx.split.config import SplitConfig
from phalanx.split.hardware.measure import measure_code
from phalanx.split.hardware.tpm_tier import open_tpm_tier


@dataclass(frozen=True)
class Tier:
    """An enclave's means.

    Attributes:
        name: A key of `TIERS`.
        key: 32 bytes for its sealed states.
        counter: Gives the monotonic counter of a purpose: "epoch", "sealed" or "settled".
    """

    name: str
    attester: Attester
    key: bytes
    counter: Callable[[str], MonotonicCounter]
    close: Callable[[], None] = lambda: None


def describe_protection(split: SplitConfig) -> str:
    """Describe in one line what a split's guard protects."""
    if split.mode == "plaintext":
        return "plaintext: NOT SECURE: the enclave's host can read and alter everything"
    return TIERS[split.tier]


def open_tier(split: SplitConfig, directory: Path, identity: Identity) -> Tier:
    """Open what an enclave has at its tier, and make it at the first start.

    Raises:
        CertificateError: The directory is unusable.
        TpmError: The TPM is not there, or has another state than when the enclave was first started.
    """
    make_private_directory(directory)
    return _OPENERS[split.tier](split, directory, identity)


def open_epochs(directory: Path, counter: MonotonicCounter) -> EpochStore:
    """Open the epochs of a party, and begin them where its directory is new.

    Raises:
        RollbackError: Its file is damaged.
    """
    path = directory / "epoch"
    if not path.exists() and counter.read_count() == 0:
        return EpochStore.create(path, counter)
    return EpochStore(path, counter)


def file_counter(directory: Path, purpose: str) -> MonotonicCounter:
    """Return the counter of a purpose in a file. NOT ROLLBACK-PROOF."""
    return NotRollbackProofCounter(directory / f"{purpose}.count")


def _open_files(split: SplitConfig, directory: Path, identity: Identity) -> Tier:
    """Open a tier that rests on files: its evidence is simulated, and a sandbox's worth shows in its report."""
    path = directory / "seal.key"
    if not path.exists():
        write_private(path, secrets.token_bytes(32))
    key = read_private(path, "the enclave makes it at its first start")
    attester = SimAttester(identity, measure_code())
    return Tier(split.tier, attester, key, lambda purpose: file_counter(directory, purpose))


def _open_tpm(split: SplitConfig, directory: Path, identity: Identity) -> Tier:
    del identity
    means = open_tpm_tier(directory, split.tpm)
    return Tier(split.tier, means.attester, means.key, means.counter_for, means.close)


_OPENERS: Mapping[str, Callable[[SplitConfig, Path, Identity], Tier]] = MappingProxyType(
    {"sim": _open_files, "process": _open_files, "tpm": _open_tpm}
)
