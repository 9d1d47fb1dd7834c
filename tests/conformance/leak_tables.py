"""How the rows of the tables of `docs/leaks.md` about pipelines are made from the raw result that it names."""

from collections.abc import Iterator
from statistics import mean
from typing import Any

Result = dict[str, Any]
STAGES = "stage-leaks-cpu-2cores-busy.json"


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def guard(row: Result) -> str:
    return f"noise {row['noise']:g}" if row["guard"] == "noise" else str(row["guard"])


def kinds(row: Result) -> list[str]:
    return [percent(row["properties"][name]) if name in row["properties"] else "-" for name in ("domain", "medical")]


def blocks(row: Result) -> str:
    first, last = row["first_layer"], row["end_layer"] - 1
    return f"{first}" if first == last else f"{first} to {last}"


def by_stage(result: Result) -> Iterator[str]:
    """What each middle stage learns where nothing is hidden."""
    for row in result["summary"]:
        if row["guard"] == "plaintext":
            attacks = row["tokens_by_attack"].values()
            yield line(
                row["model"],
                row["regime"],
                blocks(row),
                percent(row["tokens"]),
                row["tokens_attack"].replace("_", " "),
                *("-" if share is None else percent(share) for share in attacks),
                percent(row["labels"]),
                *kinds(row),
            )


def by_guard(result: Result) -> Iterator[str]:
    """What the first and the last middle stage learn under each guard, and what it costs the model."""
    last = {row["model"]: max(one["stage"] for one in of(result, row["model"])) for row in result["summary"]}
    for row in result["summary"]:
        if row["stage"] in (1, last[row["model"]]):
            base = loss_without_guard(result, row)
            yield line(
                row["model"],
                row["regime"],
                guard(row),
                blocks(row),
                f"{percent(row['tokens'])} ({percent(row['tokens_chance'])})",
                f"{percent(row['labels'])} ({percent(row['labels_chance'])})",
                *kinds(row),
                f"{row['loss']:.3f}",
                f"{100 * (row['loss'] / base - 1):+.1f} %",
            )


def loss_without_guard(result: Result, row: Result) -> float:
    """The loss of the same seeds with nothing hidden."""
    key = ("model", "regime")
    mine = [other for other in result["rows"] if all(other[name] == row[name] for name in key)]
    seeds = {other["seed"] for other in mine if (other["guard"], other["noise"]) == (row["guard"], row["noise"])}
    return mean(other["loss"] for other in mine if other["guard"] == "plaintext" and other["seed"] in seeds)


def of(result: Result, model: str) -> list[Result]:
    return [row for row in result["summary"] if row["model"] == model]


def by_layers_of_the_owner(result: Result) -> Iterator[str]:
    """The first foreign block, and the owner's share of the work that goes with it."""
    for row in result["summary"]:
        if row["guard"] == "plaintext":
            owner = f"{row['first_layer']} of {result['models'][row['model']]['layers']}"
            yield line(row["model"], row["regime"], owner, percent(row["owner_cpu_share"]), percent(row["tokens"]))


def by_price(result: Result) -> Iterator[str]:
    for row in result["prices"]:
        milliseconds = ("-" if row[key] is None else f"{1000 * row[key]:.2f}" for key in ("hide_s", "read_s"))
        size = "-" if row["bytes"] is None else f"{row['bytes']:,}"
        product = "-" if row["product_s"] is None else f"{1000 * row['product_s']:.2f}"
        yield line(row["guard"].replace("_", " "), *milliseconds, size, product)


ROWS = tuple(("docs/leaks.md", STAGES, rows) for rows in (by_stage, by_guard, by_layers_of_the_owner, by_price))
