"""Three ways to guard a run, by name: how much is recomputed, by which party, and how far a conviction goes back."""

from collections.abc import Mapping
from typing import Any, Literal

from phalanx.pipeline.upkeep import REMOVED_SHADOWS, UPKEEPS

Preset = Literal["light", "standard", "strict"]

PRESETS: Mapping[Preset, Mapping[str, Any]] = {
    "light": {
        "audit_rate": 1 / 16,
        "step_audit_rate": 1 / 64,
        "owner_audit_rate": 1 / 128,
        "keep_states": 896,
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
"""`keep_states` is at least as many steps as it takes to find a league with 99.9 % (a test says so)."""

BASELINES: Mapping[object, Mapping[str, Any]] = {
    "paper": {
        "audit_rate": 1.0,
        "step_audit_rate": 0.0,
        "owner_audit_rate": 0.0,
        "third_party_audit_rate": 0.0,
        "shadow": "lockstep",
        "screen": False,
    },
    "statistics": {
        "step_audit_rate": 0.0,
        "owner_audit_rate": 0.0,
        "third_party_audit_rate": 0.0,
        "shadow": "gradient",
        "screen": True,
    },
}
"""What a mode that is compared with fixes: its rates are not for choice."""

_WRITTEN_OUT = frozenset({*PRESETS["standard"], "keep_steps", "third_party_audit_rate"})


def with_standard(section: Mapping[str, Any]) -> dict[str, Any]:
    """Add the preset ``standard`` to the ``[guard]`` of a run file that names none and leaves a key of a preset out.

    A config that a run directory holds has every key written out, so it means what it meant when it was written.
    """
    is_open = section.get("mode", "phalanx") == "phalanx" and not PRESETS["standard"].keys() <= section.keys()
    return {"preset": "standard", **section} if is_open else dict(section)


def settled(found: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what a preset or a baseline decides and the run file does not say.

    A key that is written out wins over a preset that is named. Where keys are written out and no preset is named,
    there is none, and what is left out has its plain default.

    Raises:
        ValueError: A baseline has fixed rates, and another one or a preset is written beside it; or the upkeep is gone.
    """
    shadow = found.get("shadow")
    if isinstance(shadow, str) and shadow in REMOVED_SHADOWS:
        reason = REMOVED_SHADOWS[shadow]
        raise ValueError(f'shadow = "{shadow}" was removed: {reason}; write shadow = "gradient" or leave it out')
    found = _with_preset(found)
    fixed = BASELINES.get(found.get("mode"))
    if fixed is None:
        return found
    bent = sorted(key for key, value in fixed.items() if found.get(key, value) != value)
    if bent:
        fixes = ", ".join(f"{key} = {fixed[key]!r} (found {found[key]!r})" for key in bent)
        removed = " ".join(f"--unset guard.{key}" for key in bent)
        raise ValueError(f"mode = {found['mode']!r} fixes {fixes}; remove what differs, or give {removed}")
    return {**found, **fixed}


def _with_preset(found: Mapping[str, Any]) -> dict[str, Any]:
    mode, named = found.get("mode", "phalanx"), "preset" in found
    if not named and (mode != "phalanx" or _WRITTEN_OUT & found.keys()):
        return {**found, "preset": None}
    name = found.get("preset", "standard")
    if name not in PRESETS or mode == "off":
        return {**found, "preset": None} if mode == "off" else dict(found)
    if mode != "phalanx":
        raise ValueError(
            f"preset = {name!r} with mode = {mode!r}, which fixes its own rates; remove preset (--unset guard.preset)"
        )
    chosen = {"preset": name, **PRESETS[name]}
    upkeep = UPKEEPS.get(found.get("shadow", "gradient"))
    if found.get("keep_steps") or upkeep is None or not upkeep.makes_updates:
        chosen["keep_states"] = 0
    return {**chosen, **found}
