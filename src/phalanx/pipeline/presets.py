"""Three ways to guard a run, by name: how much is recomputed, by which party, and how far a conviction goes back."""

from collections.abc import Mapping
from typing import Any, Literal

Preset = Literal["light", "standard", "strict"]

PRESETS: Mapping[Preset, Mapping[str, Any]] = {
    "light": {
        "audit_rate": 1 / 16,
        "step_audit_rate": 1 / 64,
        "owner_audit_rate": 1 / 128,
        "keep_states": 0,
        "gradient_screen": False,
    },
    "standard": {
        "audit_rate": 1 / 8,
        "step_audit_rate": 1 / 64,
        "owner_audit_rate": 1 / 32,
        "keep_states": 224,
        "gradient_screen": True,
    },
    "strict": {
        "audit_rate": 1 / 4,
        "step_audit_rate": 1 / 16,
        "owner_audit_rate": 1 / 8,
        "keep_states": 56,
        "gradient_screen": True,
    },
}
"""`keep_states` reaches back at least as many steps as it takes to find a league with 99.9 % (a test says so)."""

_WRITTEN_OUT = frozenset({*PRESETS["standard"], "keep_steps", "third_party_audit_rate"})
_MAKE_UPDATES = ("gradient", "adapters", "lockstep")


def settled(found: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what a preset decides and the run file does not say.

    A key that is written out wins over a preset that is named. Where keys are written out and no preset is named,
    there is none, and what is left out has its plain default.

    Raises:
        ValueError: A preset is named beside a baseline, and a baseline has fixed rates.
    """
    mode, named = found.get("mode", "phalanx"), "preset" in found
    if not named and (mode != "phalanx" or _WRITTEN_OUT & found.keys()):
        return {**found, "preset": None}
    name = found.get("preset", "standard")
    if name not in PRESETS or mode == "off":
        return {**found, "preset": None} if mode == "off" else dict(found)
    if mode != "phalanx":
        raise ValueError(f"preset = {name!r} with mode = {mode!r}, which fixes its own rates; leave preset out")
    chosen = {"preset": name, **PRESETS[name]}
    if found.get("keep_steps") or found.get("shadow", "gradient") not in _MAKE_UPDATES:
        chosen["keep_states"] = 0
    return {**chosen, **found}
