"""The sites of federated rounds: how often each took part, why it did not, and what its own texts say."""

from collections import Counter
from typing import Any

from phalanx.report.figures import count, number, size, words
from phalanx.report.markup import Markup
from phalanx.report.read import Row, RunRecord
from phalanx.report.shell import section
from phalanx.report.tables import table

_MOST_SITES, _MOST_REASONS = 200, 6
_HEADS = ["Site", "Rounds", "Left out", "Training loss", "Norm", "Own loss before", "after", "Own accuracy", "Bytes"]


def sites_section(record: RunRecord) -> Markup | None:
    """Return a table of sites; None of a run without rounds."""
    rounds = [row for row in record.rounds if isinstance(row.get("sites"), dict) and "round" in row]
    if not rounds:
        return None
    measured = [row["sites"] for row in record.rounds if isinstance(row.get("sites"), dict) and "measured" in row]
    names = sorted({name for row in rounds for name in row["sites"]})
    rows = [_row(name, rounds, measured) for name in names[:_MOST_SITES]]
    sums = sum(len(row["sums"]) for row in rounds if isinstance(row.get("sums"), list))
    how = f"{count(sums)} secure sums; the owner saw no update." if sums else "The owner saw each update."
    said = "Losses and accuracies are what sites say."
    if (spent := number(rounds[-1].get("epsilon"))) is not None:
        said = f"Its sums have spent epsilon {spent:.3f} of each site, and sites tell nothing beside them."
    remark = f"{count(len(rounds))} rounds. {how} {said}"
    return section("Sites", remark, table(_HEADS, rows, "figures"))


def _row(name: str, rounds: list[Row], measured: list[Row]) -> list[str]:
    shares = [one for row in rounds if isinstance(one := row["sites"].get(name), dict)]
    trained = [one for one in shares if "left_out" not in one]
    why = Counter(words(one["left_out"], 40) or "not reached" for one in shares if "left_out" in one)
    own = [one for row in measured if isinstance(one := row.get(name), dict) and number(one.get("loss")) is not None]
    moved = sum(
        number(value) or 0.0
        for row in rounds
        if isinstance(row.get("bytes"), dict)
        for link, value in row["bytes"].items()
        if name in link.split(">")
    )
    return [
        words(name, 70),
        count(len(trained)),
        ", ".join(f"{reason} ({count(times)})" for reason, times in why.most_common(_MOST_REASONS)),
        _figure(trained[-1:], "loss"),
        _figure(trained[-1:], "norm"),
        _figure(own[:1], "loss"),
        _figure(own[-1:], "loss"),
        _figure(own[-1:], "accuracy"),
        size(moved),
    ]


def _figure(rows: list[dict[str, Any]], key: str) -> str:
    value = number(rows[0].get(key)) if rows else None
    return "" if value is None else f"{value:.4g}"
