"""A search over the values of a run file: what is refused, what is remembered, and who can win."""

import errno
import json
import math
from dataclasses import replace

import pytest
from fake_trials import BEST_RATE, Death, FakeTrials, TrustingTrials, UnrepeatedTrials, write_files

from phalanx.errors import CheckpointError, ConfigError
from phalanx.evaluate.intervals import difference_by_chance
from phalanx.sweep import Sweep, load_sweep
from phalanx.sweep.journal import JOURNAL, Trial
from phalanx.sweep.sampler import choose_values, num_startup
from phalanx.train.batches.scores import ValidationResult


def search(home, trials, /, *, resume=False, **changes):
    sweep = load_sweep(home / "sweep.toml", [f"{key}={value}" for key, value in changes.items()])
    return Sweep(sweep, home / "found", trials, lambda _line: None).run_search(resume=resume)


def journal_of(home):
    return (home / "found" / JOURNAL).read_text().splitlines()


@pytest.mark.parametrize("sampler", ["tpe", "gp", "random"])
def test_every_sampler_comes_near_the_best_rate_and_its_runs_name_the_winner(tmp_path, sampler):
    write_files(tmp_path, f'sampler = "{sampler}"', "trials = 12")

    result = search(tmp_path, FakeTrials())

    rate = result.winning_values["optimizer.lr"]
    assert abs(math.log(rate / BEST_RATE)) < {"tpe": 1.0, "gp": 0.1, "random": 2.0}[sampler]
    assert result.num_steps == 12 * 9 + 2 * 2 * 9
    assert len(result.trials[result.winner].again) == 2


def test_a_grid_tries_every_combination_once(tmp_path):
    space = '"optimizer.lr" = { choices = [0.01, 0.1] }\n"train.batch_size" = { choices = [4, 8, 16] }'
    write_files(tmp_path, 'sampler = "grid"', "trials = 100", space=space)

    result = search(tmp_path, FakeTrials())

    assert len({json.dumps(trial.values) for trial in result.trials}) == len(result.trials) == 6


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ('"optimizer.rate" = { choices = [0.1, 0.2] }', r"space\.optimizer\.rate: .*unknown key"),
        ('"optimizer.lr" = { low = -1.0, high = 1.0 }', r"space\.optimizer\.lr: .*greater than 0"),
        ('"train.batch_size" = { choices = [8, 9] }', r"space\.train\.batch_size: .*equal parts"),
        ('"train.seed" = { choices = [1, 2] }', "luckiest"),
        ('"optimizer.lr" = { low = 1.0, high = 0.1 }', "swap them"),
        ('"optimizer.lr" = { low = 0.0, high = 0.1, log = true }', "above 0"),
        ('"optimizer.lr" = { low = 0.1 }', "low and high"),
        ('"optimizer.lr" = { choices = [0.1, 0.1] }', "two different"),
    ],
)
def test_values_that_the_run_file_does_not_allow_are_refused_before_a_trial(tmp_path, space, message):
    path = write_files(tmp_path, space=space)

    with pytest.raises(ConfigError, match=message):
        load_sweep(path)


def test_a_set_or_seed_that_measures_nothing_new_is_refused(tmp_path):
    path = write_files(tmp_path, 'on = "letters"')
    with pytest.raises(ConfigError, match=r'on = "letters" is no validation set .* validation'):
        load_sweep(path)
    path = write_files(tmp_path)
    with pytest.raises(ConfigError, match="own seed 3"):
        load_sweep(path, ["again.seeds=[3]"])


def test_a_trial_that_does_not_fit_is_refused_before_it_starts_and_costs_no_step(tmp_path):
    space = '"model.architecture.n_embd" = { choices = [32, 64] }\n"optimizer.lr" = { choices = [0.01, 0.1] }'
    write_files(tmp_path, 'sampler = "grid"', "max_memory_mib = 40", space=space)
    trials = FakeTrials()

    result = search(tmp_path, trials)

    states = [(trial.values["model.architecture.n_embd"], trial.state, trial.steps) for trial in result.trials]
    assert states == [(32, "completed", 9)] * 2 + [(64, "refused", 0)] * 2
    assert {name[:4] for name in trials.calls} == {"0000", "0001"}


def test_the_steps_of_a_search_stay_below_their_bound(tmp_path):
    write_files(tmp_path, "trials = 50", "max_steps = 100")

    result = search(tmp_path, FakeTrials())

    # 36 steps are kept for the two best ones
    assert (len(result.trials), result.num_steps) == (7, 99)


def test_the_bound_holds_where_trials_differ_in_their_steps(tmp_path):
    space = '"train.steps" = { choices = [9, 30] }\n"optimizer.lr" = { low = 1e-3, high = 0.1, log = true }'
    write_files(tmp_path, "trials = 50", "max_steps = 300", space=space)

    result = search(tmp_path, FakeTrials())

    assert len({trial.steps for trial in result.trials}) == 2
    assert 200 < result.num_steps <= 300


def test_a_bound_that_leaves_no_step_for_a_trial_is_refused(tmp_path):
    # one trial, and two that are trained again with two seeds
    path = write_files(tmp_path, "max_steps = 44")

    with pytest.raises(ConfigError, match=r"max_steps = 44.* 45"):
        load_sweep(path)
    assert load_sweep(path, ["max_steps=45"]).max_steps == 45


@pytest.mark.parametrize("pruner", ["median", "third"])
def test_hopeless_trials_are_cut_short_and_the_best_one_is_not(tmp_path, pruner):
    write_files(tmp_path, f'pruner = "{pruner}"', "trials = 14", "seed = 2")

    result = search(tmp_path, FakeTrials())

    cut = [trial for trial in result.trials if trial.state == "pruned"]
    assert cut and all(trial.steps < 9 and trial.loss is None for trial in cut)
    assert min(result.trials, key=lambda trial: FakeTrials().loss_of(made(trial, tmp_path))).state == "completed"


def made(trial, home):
    return load_sweep(home / "sweep.toml").make_run(trial.values)


def test_a_search_that_dies_anywhere_and_goes_on_is_the_search_that_was_never_disturbed(tmp_path):
    (tmp_path / "whole").mkdir()
    write_files(tmp_path / "whole", 'pruner = "median"', "trials = 9")
    undisturbed = search(tmp_path / "whole", FakeTrials())
    for lives in range(1, 40, 9):
        home = tmp_path / f"dies-{lives}"
        home.mkdir()
        write_files(home, 'pruner = "median"', "trials = 9")
        with pytest.raises(Death):
            search(home, FakeTrials(lives))
        # half a line, as a crash of the machine leaves it
        with (home / "found" / JOURNAL).open("a") as file:
            file.write('{"kind": "rep')

        result = search(home, FakeTrials(), resume=True)

        assert journal_of(home) == journal_of(tmp_path / "whole")
        assert result.to_json() == undisturbed.to_json()


class LateTrials(FakeTrials):
    """All trials fall at their last validation but one, which is hopeless there and nowhere before."""

    def train_trial(self, run, directory, on_validation):
        for step in (3, 6, 9):
            loss = 1.0 if step == 9 and directory.name != "0005" else 2.0
            on_validation(step, ValidationResult(math.exp(loss)))
        return "completed"

    def measure_loss(self, run, directory, on):
        if directory.name == "0005":
            # a call before each of six trials, and this one
            self.breathe()
        return self.loss_of(run)


def test_a_trial_that_was_trained_to_its_end_is_not_cut_short_when_the_search_goes_on(tmp_path):
    write_files(tmp_path, 'pruner = "median"', "trials = 6")
    with pytest.raises(Death):
        search(tmp_path, LateTrials(lives=6))
    assert '"step": 9' in journal_of(tmp_path)[-1]

    result = search(tmp_path, LateTrials(), resume=True)

    assert (result.trials[5].state, result.trials[5].steps) == ("completed", 9)


class FullDisk(FakeTrials):
    """No space is left when one run is trained."""

    def train_trial(self, run, directory, on_validation):
        if directory.name == self.lies["full"]:
            raise CheckpointError(f"{directory}: no space") from OSError(errno.ENOSPC, "No space left on device")
        return super().train_trial(run, directory, on_validation)


@pytest.mark.parametrize("name", ["0002", "0002-seed-12"])
def test_a_full_disk_is_no_verdict_on_a_trial(tmp_path, name):
    write_files(tmp_path, "trials = 4")
    with pytest.raises(CheckpointError, match="no space"):
        search(tmp_path, FullDisk(lies={"full": name}), **{"again.best": 4})

    result = search(tmp_path, FakeTrials(), resume=True, **{"again.best": 4})

    assert all(trial.state == "completed" and math.isfinite(sum(trial.again.values())) for trial in result.trials)


def test_a_search_that_has_ended_goes_on_with_more_trials(tmp_path):
    write_files(tmp_path, "trials = 4")
    search(tmp_path, FakeTrials())

    result = search(tmp_path, FakeTrials(), resume=True, trials=9)

    assert len(result.trials) == 9
    best = sorted(result.trials, key=lambda trial: trial.loss)[:2]
    assert result.winner in {trial.number for trial in best if len(trial.again) == 2}


def test_what_was_measured_on_one_set_or_by_one_run_file_decides_in_no_other_search(tmp_path):
    write_files(tmp_path, "trials = 3")
    search(tmp_path, FakeTrials())
    run_file = tmp_path / "run.toml"
    text = run_file.read_text()

    run_file.write_text(text.replace("steps = 9", "steps = 12"))
    with pytest.raises(ConfigError, match="other values"):
        search(tmp_path, FakeTrials(), resume=True)
    run_file.write_text(text)
    sweep = load_sweep(tmp_path / "sweep.toml")
    other = sweep.model_copy(update={"again": sweep.again.model_copy(update={"on": "letters"})})
    with pytest.raises(ConfigError, match="other values"):
        Sweep(other, tmp_path / "found", FakeTrials(), lambda _line: None).run_search(resume=True)


def test_a_run_file_that_ends_its_runs_early_is_refused(tmp_path):
    path = write_files(tmp_path)
    text = (tmp_path / "run.toml").read_text()
    (tmp_path / "run.toml").write_text(text + "[train.early_stopping]\npatience = 1\n")

    with pytest.raises(ConfigError, match=r"early_stopping.*pruner"):
        load_sweep(path)


def test_a_search_is_not_mixed_with_another_one(tmp_path):
    write_files(tmp_path, "trials = 3")
    search(tmp_path, FakeTrials())

    with pytest.raises(ConfigError, match="--resume"):
        search(tmp_path, FakeTrials())
    with pytest.raises(ConfigError, match="other values"):
        search(tmp_path, FakeTrials(), resume=True, seed=1)
    # done: nothing is trained again
    trials = FakeTrials()
    search(tmp_path, trials, resume=True)
    assert trials.calls == []


def test_a_trial_that_lies_about_its_loss_wins_where_it_is_believed_and_not_where_the_owner_measures(tmp_path):
    write_files(tmp_path, "trials = 8")
    # its runs lie when they are trained again as well
    lies = {"0002": 0.1, "0002-seed-11": 0.1, "0002-seed-12": 0.1}

    believed = search(tmp_path, TrustingTrials(lies=lies))
    (tmp_path / "found").rename(tmp_path / "believed")
    measured = search(tmp_path, FakeTrials(lies=lies))

    assert believed.winner == 2
    assert measured.winner != 2
    assert measured.trials[2].loss > min(trial.loss for trial in measured.trials)


def test_a_trial_that_was_taught_the_text_it_is_chosen_by_loses_when_it_is_trained_again(tmp_path):
    write_files(tmp_path, "trials = 8")
    # its checkpoint measures well, for it has seen the held-out text; trained again by the owner it is as it is
    poisoned = {"0002": 0.5}

    believed = search(tmp_path, UnrepeatedTrials(poisoned=poisoned))
    (tmp_path / "found").rename(tmp_path / "believed")
    result = search(tmp_path, FakeTrials(poisoned=poisoned))

    assert believed.winner == 2
    assert result.trials[2].loss == 0.5 == min(trial.loss for trial in result.trials)
    assert result.winner != 2
    assert len(result.trials[2].again) == 2


def test_a_loss_that_is_no_number_never_wins(tmp_path):
    write_files(tmp_path, "trials = 5")
    names = [f"{number:04d}" for number in range(5)]

    result = search(tmp_path, FakeTrials(poisoned=dict.fromkeys(names, math.nan)))

    assert (result.winner, {trial.state for trial in result.trials}) == (None, {"failed"})
    assert "no trial was trained to its end" in result.describe_winner()


def test_a_tie_is_called_one(tmp_path):
    write_files(tmp_path, "trials = 4", 'sampler = "random"')
    result = search(tmp_path, FakeTrials())

    first, second = [list(trial.again.values()) for trial in result.trials if trial.again]
    assert result.noise == pytest.approx(difference_by_chance([first, second]))
    assert "a tie" in replace(result, lead=0.1, noise=0.2).describe_winner()
    assert "a tie" in replace(result, lead=0.1, noise=None).describe_winner()
    assert "a tie" not in replace(result, lead=0.3, noise=0.2).describe_winner()


def test_the_first_trials_are_spread_over_the_space(tmp_path):
    space = (
        '"optimizer.lr" = { low = 1e-4, high = 1.0, log = true }\n"model.architecture.n_layer" = { low = 1, high = 4 }'
    )
    sweep = load_sweep(write_files(tmp_path, 'sampler = "gp"', space=space))
    trials = []
    for number in range(num_startup(sweep)):
        trials.append(Trial(number, choose_values(sweep, trials), "completed", 1.0))

    assert len({trial.values["model.architecture.n_layer"] for trial in trials}) >= 3
    assert len({int(math.log10(trial.values["optimizer.lr"])) for trial in trials}) >= 3
