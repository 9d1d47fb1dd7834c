"""The drawn sample in real processes: what is drawn, what a row says, and one company for real."""

from dataclasses import replace

import pytest

from phalanx.errors import TrainingError
from phalanx.lab.bench.detection.cells import PRESET_STEPS
from phalanx.lab.bench.detection.detection_processes import ProcessCompanies, draw_cells, process_run_of
from phalanx.lab.bench.detection.drills import train_quietly

CLEAN = {"final_weights_digest": "clean", "false_accusations": 0}


def liar_of(run):
    return f"worker-{run.attack.stages[0]}"


class Trainer:
    """Stands in for training: attacked runs end as `outcome` says."""

    def __init__(self, **outcome):
        self.undisturbed = 0
        self._outcome = outcome

    def __call__(self, run, directory):
        if run.attack.kind == "none":
            self.undisturbed += 1
            assert run.guard.mode == "off"
            return CLEAN
        if "error" in self._outcome:
            raise TrainingError(self._outcome["error"])
        verdicts = [{"party": liar_of(run), "step": 3, "offence": "message"}]
        return CLEAN | {"attacked_steps": [3], "evicted": [liar_of(run)], "verdicts": verdicts} | self._outcome


@pytest.fixture(scope="module")
def drawn():
    return draw_cells(24)


def test_the_sample_has_as_many_of_each_preset_and_is_the_same_each_time(drawn):
    assert [cell.guard for cell in drawn] == [name for name in sorted(PRESET_STEPS) for _ in range(8)]
    assert drawn == draw_cells(24)
    assert len({(cell.guard, cell.run.model_dump_json()) for cell in drawn}) == 24
    assert len({cell.run.attack.kind for cell in drawn}) > 8


def test_a_company_in_processes_has_the_guard_and_the_attack_of_its_cell(drawn):
    cell = drawn[0]

    run = process_run_of(cell)

    assert run.guard == cell.run.guard
    assert (run.attack.kind, run.attack.stages, run.attack.rate) == (
        cell.run.attack.kind,
        cell.run.attack.stages,
        cell.run.attack.rate,
    )
    assert run.train.steps <= cell.steps


@pytest.mark.parametrize(
    ("outcome", "held"),
    [
        ({}, True),
        ({"final_weights_digest": "other"}, False),
        ({"false_accusations": 1}, False),
        ({"error": "it fell over"}, False),
    ],
)
def test_a_company_has_held_with_the_bits_of_the_undisturbed_run_and_nobody_innocent_blamed(
    drawn, tmp_path, outcome, held
):
    trainer, cell = Trainer(**outcome), drawn[0]
    companies = ProcessCompanies(tmp_path, trainer)

    rows = [companies.train_cell(cell), companies.train_cell(cell)]

    assert [row["held"] for row in rows] == [held, held]
    assert trainer.undisturbed == 1


@pytest.mark.slow
def test_a_drawn_company_is_trained_in_processes_of_its_own(drawn, tmp_path):
    cell = next(cell for cell in drawn if cell.guard == "standard" and len(cell.run.attack.stages) == 1)

    row = ProcessCompanies(tmp_path, train_quietly).train_cell(replace(cell, steps=24))

    assert (row["error"], row["false_accusations"], row["steps"]) == (None, 0, 24)
    assert row["attacked_steps"] >= 1
    assert row["held"] is (row["bit_identical"] is True)
