"""What stands behind an enclave: who speaks for it, who keeps its key, and what counts for it."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from phalanx.errors import ConfigError
from phalanx.security.crypto import Identity, make_private_directory, read_private, write_private
from phalanx.security.seal import EpochStore, MonotonicCounter, NotRollbackProofCounter
from phalanx.security.tee import Attester, SimAttester
from phalanx.split.measure import measure_code

WORDS: Mapping[str, str] = MappingProxyType(
    {
        "sim": "sim: NOT SECURE: the evidence is simulated, and whoever has this machine has the enclave",
        "process": "process: keeps out other users of the machine, not its administrator",
        "tpm": "tpm: proves which machine and which software; its administrator can still read memory",
    }
)
"""What a tier is worth, in one line; shown wherever a run is shown."""


@dataclass(frozen=True)
class Tier:
    """An enclave's means.

    Attributes:
        name: A key of `WORDS`.
        attester: Speaks for it.
        key: 32 bytes for its sealed states.
        counter: Gives the monotonic counter of a purpose.
    """

    name: str
    attester: Attester
    key: bytes
    counter: Callable[[str], MonotonicCounter]


def check_tier(name: str) -> None:
    """Return where this release can run an enclave at a tier.

    Raises:
        ConfigError: It cannot.
    """
    if name not in _OPENERS:
        raise ConfigError(
            f'split.tier = "{name}": this release starts enclaves at the tiers {", ".join(_OPENERS)}; evidence of '
            'other kinds can be appraised with `phalanx enclave appraise`; set tier = "sim" and '
            "allow_insecure_sim = true to try the rest"
        )


def open_tier(name: str, directory: Path, identity: Identity) -> Tier:
    """Open what an enclave has at a tier, and make it at the first start.

    Args:
        name: A key of `WORDS`.
        directory: The enclave's own.
        identity: The enclave.

    Raises:
        ConfigError: The tier is not to be had here.
        CertificateError: The directory is unusable.
    """
    check_tier(name)
    make_private_directory(directory)
    return _OPENERS[name](directory, identity)


def open_epochs(directory: Path, counter: MonotonicCounter) -> EpochStore:
    """Open the epochs of a party, and begin them where its directory is new.

    Raises:
        RollbackError: Its file is damaged.
    """
    path = directory / "epoch"
    if not path.exists() and counter.read() == 0:
        return EpochStore.create(path, counter)
    return EpochStore(path, counter)


def file_counter(directory: Path, purpose: str) -> MonotonicCounter:
    """Return the counter of a purpose in a file. NOT ROLLBACK-PROOF."""
    return NotRollbackProofCounter(directory / f"{purpose}.count")


def _open_sim(directory: Path, identity: Identity) -> Tier:
    path = directory / "seal.key"
    if not path.exists():
        write_private(path, secrets.token_bytes(32))
    key = read_private(path, "the enclave makes it at its first start")
    return Tier("sim", SimAttester(identity, measure_code()), key, lambda purpose: file_counter(directory, purpose))


_OPENERS: Mapping[str, Callable[[Path, Identity], Tier]] = MappingProxyType({"sim": _open_sim})
