"""A run file that names no preset is guarded by `standard`; one that says off is not, and ranks have no guard."""

import pytest

from phalanx.config import digest_config, dump_toml
from phalanx.pipeline import PRESETS
from phalanx.planner.guard.price_law import StepSize
from phalanx.train import load_run
from phalanx.train.setup.guard_outlook import predict_guard, preset_in_words, preset_rows, short_run_note

STANDARD = PRESETS["standard"]


def values(guard):
    return {key: getattr(guard, key) for key in STANDARD}


@pytest.fixture
def read(tmp_path):
    """Reads a run file with some lines at its end."""

    def read(lines="", *overrides):
        path = tmp_path / "run.toml"
        path.write_text(
            "[model]\nfrom_scratch = true\n[model.architecture]\nmodel_type = 'gpt2'\nvocab_size = 300\n"
            "n_positions = 32\nn_embd = 16\nn_layer = 4\nn_head = 2\n[data]\nsources = [{ kind = 'python_manual' }]\n"
            "tokenizer = { kind = 'bpe', vocab_size = 300 }\nsequence_length = 32\n[train]\nsteps = 9\n"
            f"batch_size = 8\n[optimizer]\nlr = 0.1\n{lines}"
        )
        return load_run(path, overrides)

    return read


@pytest.mark.parametrize(
    ("lines", "written"),
    [
        ("", {}),
        ("[guard]\n", {}),
        ("[guard]\nmode = 'phalanx'\nshadow = 'gradient'\n", {}),
        ("[guard]\naudit_rate = 0.25\n", {"audit_rate": 0.25}),
        ("[guard]\nowner_audit_rate = 0.0\nstep_audit_rate = 0.5\n", {"owner_audit_rate": 0.0, "step_audit_rate": 0.5}),
        ("[guard]\ngradient_screen = false\n", {"gradient_screen": False}),
        ("[guard]\nkeep_states = 0\n", {"keep_states": 0}),
        ("[pipeline]\nstages = 4\n", {}),
    ],
)
def test_a_run_file_without_a_preset_gets_standard_for_what_it_leaves_out(read, lines, written):
    guard = read(lines).guard

    assert guard.preset == "standard"
    assert values(guard) == {**STANDARD, **written}


def test_an_override_without_a_preset_gets_standard_as_well(read):
    guard = read("", "guard.audit_rate=0.25").guard

    assert values(guard) == {**STANDARD, "audit_rate": 0.25}
    assert preset_in_words(guard) == "standard, with audit_rate = 0.25"


def test_a_preset_that_may_skip_steps_is_named_with_it_and_priced_for_it(read):
    economy, light = read("[guard]\npreset = 'economy'\n"), read("[guard]\npreset = 'light'\n")
    size = StepSize.of_equal_stages(1e7, 288, 32768, stages=4, microbatches=8)
    (odds, price), (dearer_odds, dearer) = predict_guard(economy, size), predict_guard(light, size)

    assert preset_in_words(economy.guard) == "economy"
    assert preset_in_words(read("[guard]\npreset = 'light'\n", "guard.min_audits=0").guard) == (
        "light, with min_audits = 0"
    )
    # 8 microbatches: an audit in every eighth step, not in each
    assert odds[0].probability == pytest.approx(1 - (7 / 8) * (255 / 256) ** 2)
    assert dearer_odds[0].probability == 1.0
    assert price.extra_compute < dearer.extra_compute / 1.5


def test_presets_are_compared_from_the_cheapest_and_slowest_to_the_dearest_and_fastest(read):
    run = read("[guard]\npreset = 'light'\n")

    rows = preset_rows(run, StepSize.of_equal_stages(1e7, 288, 32768, stages=4, microbatches=8))

    steps = [int(row["every lie found within"].split()[0]) for row in rows]
    shares = [float(row["CPU"].removeprefix("+").removesuffix(" %")) for row in rows]
    assert [row["preset"] for row in rows] == ["economy", "light (this run)", "standard", "strict"]
    assert steps == sorted(steps, reverse=True)
    assert shares == sorted(shares)
    assert [row["redone at most"] for row in rows] == ["3584 steps", "1792 steps", "448 steps", "112 steps"]


def test_a_run_without_stages_in_other_hands_has_no_presets_to_compare(read):
    assert StepSize.of_equal_stages(1e7, 288, 32768, stages=2, microbatches=8) is None


def test_a_preset_that_is_named_stays(read):
    assert values(read("[guard]\npreset = 'light'\n").guard) == PRESETS["light"]


@pytest.mark.parametrize("mode", ["off"])
def test_a_mode_that_is_asked_for_has_no_preset(read, mode):
    guard = read(f"[guard]\nmode = '{mode}'\n").guard

    assert (guard.mode, guard.preset, guard.keep_states) == (mode, None, 0)
    assert guard.is_enabled is (mode != "off")


def test_ranks_that_trust_each_other_have_no_guard(read):
    run = read("[parallel]\ndp = 2\n")

    assert run.stage_guard is None
    assert "guard" not in run.model_dump()


@pytest.mark.parametrize("keys", [dict(zip(STANDARD, (0.5, 0.0, 0.0, 0, False), strict=True))])
def test_a_config_with_every_key_means_what_it_meant_when_it_was_written(read, tmp_path, keys):
    """Such a file is in the directory of a run of an older version, whose guard had rates and no preset."""
    lines = "\n".join(f"{key} = {str(value).lower()}" for key, value in keys.items())
    run = read(f"[guard]\n{lines}\n")
    (tmp_path / "config.toml").write_text(dump_toml(run))

    assert (values(run.guard), run.guard.preset) == (keys, None)
    assert digest_config(load_run(tmp_path / "config.toml")) == digest_config(run)


@pytest.mark.parametrize("lines", ["", "[guard]\naudit_rate = 0.25\n", "[guard]\nmode = 'off'\n"])
def test_a_resolved_config_has_the_digest_of_its_run_file(read, tmp_path, lines):
    run = read(lines)
    (tmp_path / "config.toml").write_text(dump_toml(run))

    assert digest_config(load_run(tmp_path / "config.toml")) == digest_config(run)


def test_a_run_that_ends_before_its_guard_finds_every_lie_says_so(read):
    size = StepSize.of_equal_stages(50_000, 16, 256, stages=4, microbatches=4)
    odds, _ = predict_guard(read("[pipeline]\nstages = 4\n"), size)
    longest = max(finding.certain_steps for finding in odds)
    rarest = max(finding.slip_probability(9) for finding in odds)

    assert f"with 9 steps it ends before some of these lies are found, with a chance of up to {100 * rarest:.1f} %" in (
        short_run_note(odds, 9)
    )
    assert short_run_note(odds, longest) is None
    assert short_run_note(odds, longest - 1) is not None
    assert short_run_note(odds, 0) is None
