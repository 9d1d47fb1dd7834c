"""Presets fill in what is not written out, and nothing that is."""

import pytest
from pydantic import ValidationError

from phalanx.pipeline import PRESETS, REMOVED_SHADOWS, GuardConfig

KEYS = tuple(PRESETS["standard"])


def values(guard):
    return {key: getattr(guard, key) for key in KEYS}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_decides_what_is_left_out(name):
    guard = GuardConfig(preset=name)

    assert values(guard) == PRESETS[name]
    assert guard.preset_in_force == name


def test_standard_is_the_default():
    assert GuardConfig() == GuardConfig(preset="standard")
    assert GuardConfig(screen=False).preset_in_force == "standard"


@pytest.mark.parametrize("written", [{"audit_rate": 0.5}, {"owner_audit_rate": 0.0}, {"keep_states": 8}])
def test_what_is_written_out_wins_over_a_preset_that_is_named(written):
    guard = GuardConfig(preset="strict", **written)

    assert values(guard) == {**PRESETS["strict"], **written}
    assert guard.preset_in_force is None


@pytest.mark.parametrize("key", [*KEYS, "keep_steps", "third_party_audit_rate"])
def test_rates_that_are_written_out_without_a_preset_are_none(key):
    fields = GuardConfig.model_fields
    guard = GuardConfig(**{key: fields[key].default})

    assert guard.preset is None
    assert values(guard) == {name: fields[name].default for name in KEYS}


@pytest.mark.parametrize(
    "written",
    [
        {},
        {"preset": "light"},
        {"preset": "strict", "audit_rate": 0.5},
        {"audit_rate": 0.5},
        {"shadow": "snapshot"},
        {"mode": "paper"},
        {"mode": "off"},
        {"mode": "off", "preset": "strict"},
        {"preset": "light", "keep_steps": 3},
    ],
)
def test_a_resolved_config_means_the_same_when_it_is_read_again(written):
    guard = GuardConfig(**written)

    assert GuardConfig.model_validate(guard.model_dump()) == guard
    assert GuardConfig.model_validate_json(guard.model_dump_json()) == guard


@pytest.mark.parametrize("shadow", ["update", "snapshot"])
def test_an_upkeep_that_cannot_go_back_keeps_no_states(shadow):
    guard = GuardConfig(shadow=shadow)

    assert (guard.keep_states, guard.preset_in_force) == (0, "standard")


def test_a_preset_beside_a_baseline_is_refused():
    with pytest.raises(ValueError, match="preset"):
        GuardConfig(mode="paper", preset="strict")


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="standard"):
        GuardConfig(preset="paranoid")


@pytest.mark.parametrize("shadow", REMOVED_SHADOWS)
def test_an_upkeep_that_was_removed_is_refused_with_what_to_write_instead(shadow):
    with pytest.raises(ValidationError) as caught:
        GuardConfig(shadow=shadow)

    (error,) = caught.value.errors()
    assert f'shadow = "{shadow}" was removed: ' in error["msg"]
    assert 'write shadow = "gradient" or leave it out' in error["msg"]
