"""The sections of a run file that exclude each other, and why: what was written is kept or refused, never dropped."""

from collections.abc import Collection

_TRUST = "the ranks of a domain trust each other, and there are no stages in other hands"
_ENCLAVE = "an enclave and its clients take the place of stages"

EXCLUSIONS: dict[tuple[str, str], str] = {
    ("parallel", "split"): "a run is trained by ranks or by an enclave and its clients",
    ("parallel", "pipeline"): _TRUST,
    ("parallel", "guard"): _TRUST,
    ("parallel", "attack"): _TRUST,
    ("deepspeed", "split"): "only the ranks of [parallel] share by it",
    ("deepspeed", "pipeline"): "only the ranks of [parallel] share by it",
    ("deepspeed", "guard"): "only the ranks of [parallel] share by it",
    ("deepspeed", "attack"): "only the ranks of [parallel] share by it",
    ("split", "pipeline"): _ENCLAVE,
    ("split", "guard"): _ENCLAVE,
    ("split", "attack"): _ENCLAVE,
}
"""Two sections that no run file has both of, the engine's first, with the reason."""


def contradiction(written: Collection[str]) -> str | None:
    """What is wrong with a run file that has these sections; None where nothing is.

    Args:
        written: Sections that are there, whatever they hold: one that repeats every default was asked for too.
    """
    for (one, other), reason in EXCLUSIONS.items():
        if one in written and other in written:
            return f"[{one}] and [{other}] exclude each other: {reason}; remove one"
    return None


def excluded_by(written: Collection[str]) -> set[str]:
    """The sections that a run with these has no use for."""
    return {other for pair in EXCLUSIONS for one, other in (pair, pair[::-1]) if one in written}
