"""What each middle stage learns, by guard: the best attack's share over the seeds, chance, and the loss it costs."""

from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

from phalanx.lab.reproduce.stage_leaks.lab import Row, StageLeakCell
from phalanx.lab.reproduce.stage_leaks.size import Regime, StageLeakSize

_GROUP = ("model", "regime", "guard", "noise")


def stage_cells(size: StageLeakSize) -> Iterator[StageLeakCell]:
    """What is measured, seed by seed and model by model: with nothing hidden, then noise, then seals."""
    for number in range(max(len(seeds) for seeds in size.seeds.values())):
        for model, regimes in size.regimes.items():
            for seed in size.seeds[model][number : number + 1]:
                yield from (StageLeakCell(model, regime, "plaintext", 0.0, seed) for regime in regimes)
                for noise in size.noises[model]:
                    noisy = noisy_regimes(size, model)
                    yield from (StageLeakCell(model, regime, "noise", noise, seed) for regime in noisy)
                if number == 0:
                    yield from (StageLeakCell(model, regime, "sealed", 0.0, seed) for regime in regimes)


def noisy_regimes(size: StageLeakSize, model: str) -> tuple[Regime, ...]:
    """The regimes that are trained with noise: of a model that is too large for all of them the first one."""
    regimes = size.regimes[model]
    return regimes if size.pipelines[model].steps >= 100 else regimes[:1]


def summarise_stages(rows: Sequence[Row]) -> list[Row]:
    """One line for each training's middle stage.

    Returns:
        Over the seeds the mean of the best attack's share of ``tokens`` and ``labels`` with its name (of the first
        seed), of each property's share, of each chance, of the loss and of the owner's share of processor time: that
        of everything before the stage, and of the last stage.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        for place in row["stages"]:
            key = (*(row[name] for name in _GROUP), place["stage"])
            groups.setdefault(key, []).append({**row, **place})
    return [_summarise_stage(dict(zip((*_GROUP, "stage"), key, strict=True)), of) for key, of in groups.items()]


def _summarise_stage(key: Row, rows: Sequence[Row]) -> Row:
    attacks = {name: [row["tokens"][name] for row in rows] for name in rows[0]["tokens"]}
    properties = rows[0]["properties"]
    return {
        **key,
        "first_layer": rows[0]["first_layer"],
        "end_layer": rows[0]["end_layer"],
        "seeds": len(rows),
        "tokens": mean(_best_share(row["tokens"])[1] for row in rows),
        "tokens_attack": _best_share(rows[0]["tokens"])[0],
        "tokens_chance": mean(row["tokens_chance"] for row in rows),
        "tokens_by_attack": {name: None if None in shares else mean(shares) for name, shares in attacks.items()},
        "labels": mean(_best_share(row["labels"])[1] for row in rows),
        "labels_attack": _best_share(rows[0]["labels"])[0],
        "labels_chance": mean(row["labels_chance"] for row in rows),
        "properties": {name: mean(row["properties"][name] for row in rows) for name in properties},
        "properties_chance": rows[0]["properties_chance"],
        "loss_before": mean(row["loss_before"] for row in rows),
        "loss": mean(row["loss"] for row in rows),
        "owner_cpu_share": mean(_owner_share(row["stage_cpu_s"], key["stage"]) for row in rows),
    }


def _best_share(shares: Row) -> tuple[str, float]:
    measured = {name: float(share) for name, share in shares.items() if share is not None}
    best = max(measured, key=lambda name: measured[name])
    return best, measured[best]


def _owner_share(seconds: Sequence[float], stage: int) -> float:
    """The share of processor time that an owner spends who holds everything before a stage, and the last one."""
    return (sum(seconds[:stage]) + seconds[-1]) / sum(seconds)


def stage_lines(summary: Sequence[Row]) -> dict[str, list[dict[str, str]]]:
    """The summary for people, a table for each model and regime, in percent."""
    tables: dict[str, list[dict[str, str]]] = {}
    for row in summary:
        title = f"{row['model']}, {row['regime']}"
        tables.setdefault(title, []).append(stage_line(row))
    return tables


def stage_line(row: Row) -> dict[str, str]:
    """One row of the summary for people."""
    properties = {
        name: f"{_percent(share)} ({_percent(row['properties_chance'][name])})"
        for name, share in row["properties"].items()
    }
    return {
        "guard": guard_name(row),
        "stage": f"{row['stage']}, blocks {row['first_layer']} to {row['end_layer'] - 1}",
        "tokens (chance)": f"{_percent(row['tokens'])} ({_percent(row['tokens_chance'])})",
        "by": str(row["tokens_attack"]).replace("_", " "),
        "next tokens (chance)": f"{_percent(row['labels'])} ({_percent(row['labels_chance'])})",
        **{f"{name} (chance)": shown for name, shown in properties.items()},
        "loss": f"{row['loss']:.3f}",
    }


def guard_name(row: Row) -> str:
    """The guard with its level."""
    return f"noise {row['noise']:g}" if row["guard"] == "noise" else str(row["guard"])


def price_lines(prices: Sequence[Row]) -> list[dict[str, str]]:
    """The prices of one boundary for people."""
    return [
        {
            "guard": str(row["guard"]).replace("_", " "),
            "hide, ms": _milliseconds(row["hide_s"]),
            "read, ms": _milliseconds(row["read_s"]),
            "bytes": "-" if row["bytes"] is None else f"{row['bytes']:,}",
            "a product, ms": _milliseconds(row["product_s"]),
        }
        for row in prices
    ]


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
