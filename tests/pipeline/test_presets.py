"""Presets fill in what is not written out, and nothing that is."""

import pytest

from phalanx.config import digest_config as config_digest
from phalanx.errors import ConfigError
from phalanx.pipeline import PRESETS, GuardConfig
from phalanx.train import load_run
from tiny_run_file import tiny_run_file

KEYS = tuple(PRESETS["standard"])


def values(guard):
    return {key: getattr(guard, key) for key in KEYS}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_decides_what_is_left_out(name):
    guard = GuardConfig(preset=name)

    assert {key: getattr(guard, key) for key in PRESETS[name]} == PRESETS[name]
    assert guard.preset_in_force == name


def test_standard_is_the_default():
    assert GuardConfig() == GuardConfig(preset="standard")
    assert GuardConfig(screen=False).preset_in_force == "standard"


@pytest.mark.parametrize("written", [{"audit_rate": 0.5}, {"owner_audit_rate": 0.0}, {"keep_states": 8}])
def test_what_is_written_out_wins_over_a_preset_that_is_named(written):
    guard = GuardConfig(preset="strict", **written)

    assert values(guard) == {**PRESETS["strict"], **written}
    assert guard.preset_in_force is None


@pytest.mark.parametrize("key", KEYS)
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
        {"preset": "economy"},
        {"preset": "economy", "min_audits": 1},
        {"min_audits": 0},
        {"preset": "strict", "audit_rate": 0.5},
        {"audit_rate": 0.5},
        {"mode": "off"},
        {"mode": "off", "preset": "strict"},
        {"preset": "light", "keep_states": 3},
    ],
)
def test_a_resolved_config_means_the_same_when_it_is_read_again(written):
    guard = GuardConfig(**written)

    assert GuardConfig.model_validate(guard.model_dump()) == guard
    assert GuardConfig.model_validate_json(guard.model_dump_json()) == guard


def test_a_guard_that_may_skip_steps_is_no_preset_but_economy():
    assert GuardConfig(preset="economy").preset_in_force == "economy"
    assert GuardConfig(preset="light", min_audits=0).preset_in_force is None
    assert GuardConfig(preset="economy", min_audits=1).preset_in_force is None


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="standard"):
        GuardConfig(preset="paranoid")


REMOVED = {
    "keep_steps = 64": "set guard.keep_states",
    "third_party_audit_rate = 0.5": "raise guard.owner_audit_rate",
    'recovery = "restart"': "remove it",
    'recovery = "skip_layer"': "remove it",
    "snapshot_every = 8": "remove it",
    'shadow = "update"': 'set shadow = "gradient"',
    'shadow = "snapshot"': 'set shadow = "gradient"',
    'mode = "paper"': 'set shadow = "lockstep"',
    'mode = "statistics"': "remove it",
}


@pytest.mark.parametrize("written", REMOVED)
def test_what_was_removed_is_refused_with_its_place_and_what_stands_in_its_place(tmp_path, written):
    path = tmp_path / "run.toml"
    path.write_text(tiny_run_file(f"[guard]\n{written}\n"))

    with pytest.raises(ConfigError) as refusal:
        load_run(path)

    said = str(refusal.value)
    assert f"{path}: guard: {written} was removed; " in said
    assert REMOVED[written] in said


def test_a_removed_key_with_the_only_value_left_changes_nothing():
    only = {"keep_steps": 0, "third_party_audit_rate": 0.0, "recovery": "takeover", "snapshot_every": 10}

    assert GuardConfig(**only) == GuardConfig()
    # run digests and the openings of audit logs are what they were
    assert only.items() <= GuardConfig().model_dump().items()


@pytest.mark.parametrize(
    ("guard", "digest"),
    [
        ({}, "80c8a9bcfa9aba9e"),
        ({"preset": "light"}, "c2404f31fe68cd25"),
        ({"preset": "strict"}, "c5be22e01ae59523"),
        ({"mode": "off"}, "b409d91eeec2c0b2"),
        ({"shadow": "lockstep"}, "5f60f90bf1e4992c"),
        ({"commit_lag": 1}, "8ae903579b22e606"),
    ],
)
def test_the_digest_of_a_guard_is_what_it_was_when_it_had_more_keys(guard, digest):
    assert config_digest(GuardConfig(**guard)).startswith(digest)


@pytest.mark.parametrize("words", [{"mode": "off"}, {"shadow": "lockstep"}])
def test_a_second_shadow_without_a_gradient_is_refused(words):
    with pytest.raises(ValueError, match=r"shadows = 2 with .*set shadow = "):
        GuardConfig(shadows=2, **words)


def test_one_shadow_is_not_written():
    assert "shadows" not in GuardConfig().model_dump()
    assert GuardConfig(shadows=2).model_dump()["shadows"] == 2
