"""Honest companies with workers that really compute differently: none is accused, and that is no accident."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.lab.bench.detection.cell import DetectionCell
from phalanx.lab.bench.detection.cells import (
    BF16,
    BF16_MATH,
    COMPILED,
    FP32,
    MATH,
    TWO_THREADS,
    cell_on_paths,
    detection_cells,
    honest_cells,
)
from phalanx.lab.bench.detection.simulated_run import CompanyResult, play_company
from phalanx.lab.calibrate import NumericPath
from phalanx.pipeline.verify.draw import AuditDraw


def played(cell: DetectionCell, tmp_path: Path) -> CompanyResult:
    outcome = play_company(cell, tmp_path, tmp_path / "models")
    assert outcome.error is None
    return outcome


def accused(outcome: CompanyResult) -> list[object]:
    return [body["party"] for body in outcome.bodies_of("verdict")]


@pytest.mark.quick_cases("*'fp32,?math*")
@pytest.mark.parametrize("paths", [(FP32, MATH), (BF16, BF16_MATH), (FP32, TWO_THREADS)], ids=str)
def test_honest_workers_on_two_paths_accuse_nobody(
    paths: tuple[NumericPath, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coin = AuditDraw.draws_owner_audit
    by_owner: list[tuple[int, int]] = []

    def owners_step(self: AuditDraw, *, step: int, epoch: int, stage: int) -> bool:
        falls = coin(self, step=step, epoch=epoch, stage=stage)
        if falls:
            by_owner.append((step, stage))
        return falls

    monkeypatch.setattr(AuditDraw, "draws_owner_audit", owners_step)

    outcome = played(cell_on_paths(4, paths, 2), tmp_path)

    assert (accused(outcome), outcome.bodies_of("alarm")) == ([], [])
    assert outcome.differences is not None
    # two middle stages, eight microbatches, both ways, two steps
    assert outcome.differences.messages == 64
    # where the owner's coin falls, which differs from session to session, it redoes the eight of a stage once more
    assert outcome.bodies_of("gradient_doubted") == []
    assert outcome.num_audits == 32 + 8 * len(by_owner)


def test_their_bits_differ_and_their_distance_is_what_acquits_them(tmp_path: Path) -> None:
    outcome = played(cell_on_paths(4, (FP32, MATH), 2), tmp_path)

    assert outcome.differences is not None
    assert outcome.differences.unequal > 32
    assert 1e-8 < outcome.differences.largest < 1e-5


@pytest.mark.slow
def test_with_no_tolerance_to_speak_of_the_referee_acquits_everybody(tmp_path: Path) -> None:
    outcome = played(cell_on_paths(4, (FP32, MATH), 1, tolerance=1e-9), tmp_path)

    assert outcome.bodies_of("alarm") != []
    # the referee measures how far rounding moves each message; a tolerance below that blames nobody
    assert accused(outcome) == []


def test_workers_on_one_path_have_equal_bits(tmp_path: Path) -> None:
    outcome = played(cell_on_paths(4, (MATH, MATH), 1, tolerance=1e-9), tmp_path)

    assert outcome.differences is not None
    assert (outcome.differences.unequal, outcome.bodies_of("alarm")) == (0, [])


@pytest.mark.slow
def test_a_small_drift_is_named_among_honest_roundings(tmp_path: Path) -> None:
    cell = next(cell for cell in detection_cells(quick=True) if cell.paths and cell.run.attack.strength == 1e-4)

    outcome = played(replace(cell, steps=6), tmp_path)

    assert set(accused(outcome)) == {lie.party for lie in outcome.lies} == {"worker-1"}
    assert outcome.differences is None


def test_the_long_bench_audits_a_hundred_thousand_honest_messages_and_thousands_on_every_path() -> None:
    by_path: Counter[str] = Counter()
    for cell in honest_cells(quick=False):
        run = cell.run
        rate = run.guard.audit_rate if run.guard.is_enabled else 0
        messages = 2 * int(rate * run.train.microbatches) * (run.pipeline.stages - 2) * cell.steps
        by_path.update({path.name: messages // len(cell.paths) for path in cell.paths} or {"one path": messages})

    assert by_path.total() >= 100_000
    assert min(by_path.values()) >= 4_000
    assert COMPILED.name in by_path


def test_quick_compiles_nothing() -> None:
    assert not any(path.compiled for cell in honest_cells(quick=True) for path in cell.paths)
