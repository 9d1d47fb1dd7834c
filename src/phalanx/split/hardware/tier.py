"""The tiers of an enclave: what attests it, what keeps its key, and what counts its states."""

import contextlib
import hashlib
import secrets
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from phalanx.errors import RollbackError
from phalanx.security.crypto import (
    Identity,
    in_domain,
    make_private_directory,
    read_private,
    write_private,
)
from phalanx.security.seal import EpochStore, MonotonicCounter, NotRollbackProofCounter
from phalanx.security.tee import (
    TIERS,
    Attester,
    AzureAttester,
    SimAttester,
    TpmAttester,
    TpmCounter,
    TpmDevice,
    TpmSealer,
    derive_guest_key,
    open_attester,
    open_tpm,
    read_endorsements,
)
from phalanx.split.config import SplitConfig
from phalanx.split.hardware.measure import measure_code

PURPOSES = ("epoch", "sealed", "settled")
_FIRST_INDEX, _NUM_SLOTS = 0x01800000, 2**19
_SECRET = struct.Struct(">32sI3Q")


class CountFromStart:
    """A counter that begins at 0, on one of a TPM, which begins above every number that the TPM has ever given."""

    def __init__(self, counter: TpmCounter, start: int) -> None:
        self._counter, self._start = counter, start
        self.rollback_proof = counter.rollback_proof

    def read_count(self) -> int:
        """As `MonotonicCounter` says."""
        return self._from_start(self._counter.read_count())

    def increment(self) -> int:
        """As `MonotonicCounter` says."""
        return self._from_start(self._counter.increment())

    def _from_start(self, number: int) -> int:
        if number < self._start:
            raise RollbackError(f"TPM counter: is at {number}, but started at {self._start}; the TPM was reset")
        return number - self._start


@dataclass(frozen=True)
class TpmMeans:
    """The means of an enclave in a TPM.

    Attributes:
        attester: Quotes PCRs 0 to 7.
        key: 32 bytes, sealed to the state of those PCRs.
    """

    attester: Attester
    key: bytes
    _device: TpmDevice
    _base: int
    _starts: tuple[int, ...]
    _opened: contextlib.ExitStack

    def counter_for(self, purpose: str) -> MonotonicCounter:
        """Return the counter of one of `PURPOSES`."""
        slot = PURPOSES.index(purpose)
        return CountFromStart(TpmCounter(self._device, self._base + slot), self._starts[slot])

    def close(self) -> None:
        """Let go of the TPM."""
        self._opened.close()


OpenTpmAttester = Callable[[TpmDevice], contextlib.AbstractContextManager[Attester]]
"""Opens what quotes PCRs 0 to 7 of a TPM."""


def open_tpm_tier(directory: Path, address: str, open_quoter: OpenTpmAttester = TpmAttester) -> TpmMeans:
    """Open an enclave's means, and make them at its first start.

    Args:
        directory: The enclave's own; gets one sealed file.
    """
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(open_tpm(address))
        attester, sealer = stack.enter_context(open_quoter(device)), TpmSealer(device)
        path = directory / "tpm.sealed"
        if not path.exists():
            write_private(path, sealer.seal_secret(_make_secret(device)))
        key, base, *starts = _SECRET.unpack(
            sealer.unseal_secret(read_private(path, "the enclave makes it at its first start"))
        )
        return TpmMeans(attester, key, device, base, tuple(starts), stack.pop_all())


def _make_secret(device: TpmDevice) -> bytes:
    """Make a key, and the place and beginning of fresh counters: moving those to others takes the sealed file."""
    base = _FIRST_INDEX + 4 * secrets.randbelow(_NUM_SLOTS)
    starts = [TpmCounter.create_counter(device, base + slot).read_count() for slot in range(len(PURPOSES))]
    return _SECRET.pack(secrets.token_bytes(32), base, *starts)


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
    """Describe the protection of a split's guard in one line."""
    if split.mode == "plaintext":
        return "plaintext: NOT SECURE: the enclave's host can read and alter everything"
    return TIERS[split.tier]


def open_tier(split: SplitConfig, directory: Path, identity: Identity) -> Tier:
    """Open what an enclave has at its tier, and make it at the first start."""
    make_private_directory(directory)
    return _OPENERS[split.tier](split, directory, identity)


def open_epochs(directory: Path, counter: MonotonicCounter) -> EpochStore:
    """Open the epochs of a party, and begin them where its directory is new."""
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
    added = read_endorsements(split.endorsements)
    means = open_tpm_tier(directory, split.tpm, lambda device: TpmAttester(device, endorsements=added))
    return Tier(split.tier, means.attester, means.key, means.counter_for, means.close)


def _open_azure(split: SplitConfig, directory: Path, identity: Identity) -> Tier:
    """Open a tier whose key and counters are in the vTPM for which the chip vouches."""
    del identity

    def open_attester_of(device: TpmDevice) -> contextlib.AbstractContextManager[Attester]:
        return contextlib.nullcontext(AzureAttester(device, endorsements=read_endorsements(split.endorsements)))

    means = open_tpm_tier(directory, split.tpm, open_attester_of)
    return Tier(split.tier, means.attester, means.key, means.counter_for, means.close)


def _open_snp(split: SplitConfig, directory: Path, identity: Identity) -> Tier:
    """Open a tier whose key the chip derives for guests with the launch measurement and policy of its report."""
    del identity
    key = hashlib.sha256(in_domain("snp-state-key/1", derive_guest_key())).digest()
    return _with_file_counters(split, directory, key)


def _open_in_memory(split: SplitConfig, directory: Path, identity: Identity) -> Tier:
    """Open a tier whose hardware seals nothing: its key is in its memory, and no state outlives its process."""
    del identity
    return _with_file_counters(split, directory, secrets.token_bytes(32))


def _with_file_counters(split: SplitConfig, directory: Path, key: bytes) -> Tier:
    stack = contextlib.ExitStack()
    attester = stack.enter_context(open_attester(split.tier, read_endorsements(split.endorsements), tpm=split.tpm))
    return Tier(split.tier, attester, key, lambda purpose: file_counter(directory, purpose), stack.close)


_OPENERS: Mapping[str, Callable[[SplitConfig, Path, Identity], Tier]] = MappingProxyType(
    {
        "sim": _open_files,
        "process": _open_files,
        "tpm": _open_tpm,
        "az-snp-vtpm": _open_azure,
        "snp": _open_snp,
        "tdx": _open_in_memory,
        "nitro": _open_in_memory,
    }
)
