"""The measurement of the code that runs: a digest over this release, and the policy that accepts it at a tier."""

import functools
import hashlib
import importlib.metadata
import sys
from pathlib import Path

from phalanx.config import canonical_json
from phalanx.errors import ConfigError
from phalanx.security.tee import Policy, PolicyConfig, build_policy, load_policy
from phalanx.split.config import HARDWARE_TIERS, SplitConfig

_LIBRARIES = ("torch", "transformers", "peft", "cryptography", "bitsandbytes")


@functools.cache
def measure_code() -> bytes:
    """Return the SHA-256 over all source files of Phalanx and the versions of interpreter and libraries.

    Both ends compute it from their installed files. The measurement is worth as much as the tier.
    """
    root = Path(__file__).parents[2]
    total = hashlib.sha256(canonical_json([sys.version, [_package_version(name) for name in _LIBRARIES]]))
    for path in sorted(root.rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(root).as_posix()}\n{content}\n".encode())
    return total.digest()


def policy_of(split: SplitConfig) -> Policy:
    """Return the policy that a client accepts: the run's policy file, read now, or this release's own code."""
    if split.policy is not None:
        return load_policy(Path(split.policy))[0]
    if split.tier in HARDWARE_TIERS:
        raise ConfigError(f'split.policy: missing; tier = "{split.tier}" needs the values that its evidence must have')
    measurements = {"code": (measure_code().hex(),)}
    config = PolicyConfig.model_validate({"allow_insecure_sim": True, "sim": {"measurements": measurements}})
    return build_policy(config, Path())


def _package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
