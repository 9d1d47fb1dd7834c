"""The tables of the page on side channels are those of the raw result."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "side_channels.md").read_text(encoding="utf-8")
RESULT = json.loads(
    (ROOT / "benchmarks" / "results" / "side-channels-cpu-2cores-busy.json").read_text(encoding="utf-8")
)


def table_of_sizes():
    head = "| channel | padded | sizes seen | label by size | by time | without "
    lines = [f"{head}| length error by size | by time | without |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for row in RESULT["sizes"]:
        accuracies = [f"{row[f'label_accuracy_{signal}']:.2f}" for signal in ("size", "time", "without")]
        errors = [f"{100 * row[f'length_error_{signal}']:.0f} %" for signal in ("size", "time", "without")]
        cells = [row["channel"], "yes" if row["padded"] else "no", str(row["sizes"]), *accuracies, *errors]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_times():
    lines = [
        "| operation | classes | calls | Welch's t | median, first | median, second |",
        "|---|---|---|---|---|---|",
    ]
    for row in RESULT["timing"]:
        medians = [f"{row[f'median_us_{number}']:.2f} us" for number in (1, 2)]
        lines.append(
            f"| {row['operation']} | {row['classes']} | {row['calls']} | {row['welch_t']:.1f} | {' | '.join(medians)} |"
        )
    return "\n".join(lines)


def table_of_states():
    lines = ["| put back | states | refused |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {r['put_back']} | {r['states']} | {r['refused']} |" for r in RESULT["rollback"])])


def test_the_tables_are_those_of_the_raw_result():
    assert "dirty" not in RESULT["commit"]
    for table in (table_of_sizes(), table_of_times(), table_of_states()):
        assert table in PAGE


def test_what_the_page_says_follows_from_the_result():
    padded, bare = ([row for row in RESULT["sizes"] if row["padded"] is wanted] for wanted in (True, False))
    assert all(row["sizes"] == 1 and row["label_accuracy_size"] <= row["label_accuracy_without"] for row in padded)
    assert all(row["label_accuracy_size"] > 0.8 and row["length_error_size"] == 0 for row in bare)
    assert all(abs(row["welch_t"]) < 4.5 for row in RESULT["timing"])
    assert [row["refused"] for row in RESULT["rollback"]] == [50, 0]
