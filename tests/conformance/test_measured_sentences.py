"""Sentences of the docs with figures are made again from the raw results that they name."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
Result = dict[str, Any]


@dataclass(frozen=True)
class Figures:
    """A sentence of a page, with a place for each figure, and how the raw result gives them."""

    page: str
    result: str
    sentence: str
    values: Callable[[Result], Sequence[object]]

    def __str__(self) -> str:
        return f"{self.page}: {self.sentence[:40]}"

    def made_again(self) -> str:
        """The sentence with the figures of the raw result."""
        return self.sentence.format(*self.values(json.loads((RESULTS / self.result).read_text(encoding="utf-8"))))


def one(result: Result, **what: object) -> Result:
    """The one row with these values."""
    (row,) = [row for row in result["rows"] if all(row[key] == value for key, value in what.items())]
    return row


def percent(share: float) -> float:
    return 100 * share


def split(result: Result, mode: str, width: int, layers: int) -> Result:
    return one(result, mode=mode, width=width, layers=layers, wire="fp32")


def wide_split(result: Result) -> Sequence[object]:
    plain, sealed = split(result, "plaintext", 576, 8), split(result, "sealed", 576, 8)
    shares = sealed["crypto_share"], sealed["security_share"], plain["security_share"]
    return [plain["step_s"], sealed["step_s"], *map(percent, shares)]


def small_split(result: Result) -> Sequence[object]:
    plain, sealed, masked = (split(result, mode, 256, 4) for mode in ("plaintext", "sealed", "masked"))
    shares = sealed["crypto_share"], sealed["security_share"], plain["security_share"]
    more = sealed["bytes_per_step"] - plain["bytes_per_step"]
    return [plain["step_s"], *map(percent, shares), more, plain["bytes_per_step"], masked["step_s"]]


def kept_bits(result: Result) -> Sequence[object]:
    key = ("family", "domain", "regime", "seed")
    clean = {tuple(row[k] for k in key): row["weights_digest"] for row in result["rows"] if row["arm"] == "clean"}
    guarded = [row for row in result["rows"] if row["arm"] in ("phalanx", "phalanx_no_attacker")]
    return [sum(row["weights_digest"] == clean[tuple(row[k] for k in key)] for row in guarded), len(guarded)]


def false_alarms(result: Result) -> Sequence[object]:
    rows = [row for row in result["rows"] if row["arm"] == "statistics"]
    assert {row["regime"] for row in rows} == {"plain"}
    return [sum(row["honest_accused"] for row in rows), sum(row["alarms"] for row in rows)]


def preset(name: str, microbatches: int) -> Callable[[Result], Sequence[object]]:
    def values(result: Result) -> Sequence[object]:
        row = one(result, preset=name, M=microbatches)
        shares = row["extra_compute"], row["extra_expected"], row["part_audit"]
        audits = row["audits_per_step"], row["expected_audits_per_step"]
        return [name, microbatches, *map(percent, shares), *audits, percent(row["extra_memory"]), row["extra_bytes"]]

    return values


def met_at_once(result: Result) -> Sequence[object]:
    rows = [row for row in result["rows"] if row["attacked_steps"] and row["guard"] == "standard"]
    same = sum(row["steps_to_detection"] == 0 for row in rows)
    return [same, len(rows), sum(row["bit_identical"] for row in rows), len(rows)]


def accused(result: Result) -> Sequence[object]:
    found = result["false_accusations_per_million"]
    return [found["false_accusations"], found["audited_messages_of_honest_companies"], found["audited_messages"]]


def in_processes(result: Result) -> Sequence[object]:
    rows = result["rows"]
    assert {row["false_accusations"] for row in rows} == {0}
    return [sum(row["detected"] for row in rows), len(rows), sum(row["bit_identical"] for row in rows)]


PRESET_ROW = "| `{}`, {} | {:.1f} % | {:.1f} % | {:.1f} % | {:.1f} for {:.1f} | {:.1f} % | {:.2f} |"
PRESETS, STANDARD = "overhead-presets-cpu-2cores.json", "detection-partial-cpu-2cores-busy.json"
SPLIT, DEFENCE = "split-cpu-2cores-quick.json", "reproduce-defence-small-cpu-2cores-busy.json"
FIGURES = (
    Figures(
        "docs/benchmarks.md",
        "detection-processes-partial-cpu-2cores-busy.json",
        "{} of {} companies named their liar, {} ended with the bits of the undisturbed run",
        in_processes,
    ),
    Figures(
        "docs/sealed_split.md",
        SPLIT,
        "a step took {:.2f} s in plaintext and {:.2f} s sealed, with the same weights at the end; AES-GCM took {:.2f} "
        "% of a plaintext step's CPU time and everything that security costs {:.2f} %, of which plaintext has {:.2f}",
        wide_split,
    ),
    Figures(
        "docs/sealed_split.md",
        SPLIT,
        "a step of {:.3f} s in plaintext: {:.2f} % and {:.2f} % ({:.2f}), {:.0f} bytes more on the line, of {:,.0f}; "
        "masked {:.2f} s",
        small_split,
    ),
    Figures(
        "docs/reproduction.md",
        DEFENCE,
        "has the bits of the clean run in **{} of {}** trainings, with nobody",
        kept_bits,
    ),
    *(
        Figures("docs/benchmarks.md", PRESETS, PRESET_ROW, preset(name, microbatches))
        for name in ("light", "standard", "strict")
        for microbatches in (8, 32)
    ),
    Figures(
        "docs/benchmarks.md",
        STANDARD,
        "{} of {} met in the first step in which anybody lied, {} of {} with the bits of the undisturbed run",
        met_at_once,
    ),
    Figures(
        "docs/benchmarks.md",
        STANDARD,
        "**{} false accusations, in {:,} audited messages of honest companies and {:,} in all**",
        accused,
    ),
    Figures("docs/reproduction.md", DEFENCE, "accused honest stages in {:,} of its {:,} alarms", false_alarms),
)


@pytest.mark.parametrize("figures", FIGURES, ids=str)
def test_a_sentence_with_figures_is_that_of_its_raw_result(figures):
    page = re.sub(r"\s+", " ", (ROOT / figures.page).read_text(encoding="utf-8"))

    assert figures.made_again() in page
    assert figures.result in page


@pytest.mark.parametrize("figures", FIGURES, ids=str)
def test_the_raw_result_names_its_command_and_a_commit_without_changes(figures):
    result = json.loads((RESULTS / figures.result).read_text(encoding="utf-8"))

    assert result["command"]
    assert re.fullmatch(r"[0-9a-f]{40}", result["commit"])
