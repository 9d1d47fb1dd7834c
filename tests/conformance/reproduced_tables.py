"""How the rows of `docs/reproduction.md` and `docs/backdoors.md` are made from the raw results that they name."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from statistics import mean

from measured_tables import Result, Table, line

RATES = (0.3, 0.5, 0.7)
WAYS = tuple((direction, epoch) for direction in ("forward", "backward") for epoch in ("best", "last"))
Rows = list[Result]


def place_of(row: Result) -> tuple[object, ...]:
    return tuple(row[key] for key in ("family", "domain", "regime", "seed"))


def cleans(rows: Rows) -> dict[tuple[object, ...], Result]:
    return {place_of(row): row for row in rows if row["arm"] == "clean"}


def multiple(rows: Rows, clean: dict[tuple[object, ...], Result], epoch: str) -> str:
    """Perplexity over the clean run's of the same seed: mean, least and most."""
    key = f"perplexity_{epoch}"
    found = [row[key] / clean[place_of(row)][key] for row in rows]
    spread = f" ({min(found):.2f}-{max(found):.2f})"
    return f"{mean(found):.2f}{'' if max(found) == min(found) == 1.0 else spread}"


def same_bits(rows: Rows, clean: dict[tuple[object, ...], Result]) -> str:
    same = sum(row["weights_digest"] == clean[place_of(row)]["weights_digest"] for row in rows)
    return f"{same} of {len(rows)}"


def of(rows: Rows, **wanted: object) -> Rows:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def defence(result: Result) -> Iterator[str]:
    rows = of(result["rows"], regime="plain")
    clean = cleans(rows)
    for arm in ("attacked", "oracle_drop", "skip_layer", "statistics"):
        for rate in RATES:
            mine = of(rows, arm=arm, rate=rate)
            cells = [multiple(of(mine, direction=direction), clean, epoch) for direction, epoch in WAYS]
            if arm in ("oracle_drop", "skip_layer"):
                assert cells[:2] == cells[2:]
                cells[2:] = ["the same steps"] * 2
            yield line(f"`{arm}`, {rate}", *cells, same_bits(mine, clean))
    for arm in ("restart", "phalanx"):
        mine = of(rows, arm=arm)
        cells = [multiple(of(mine, direction=direction), clean, epoch) for direction, epoch in WAYS]
        yield line(f"`{arm}`, each rate", *cells, same_bits(mine, clean))
    for arm in ("phalanx_no_attacker", "clean_early_stopping"):
        mine = of(rows, arm=arm)
        bits = same_bits(mine, clean) if arm == "phalanx_no_attacker" else ""
        cells = [multiple(mine, clean, epoch) for epoch in ("best", "last")]
        yield "| " + " | ".join([f"`{arm}`", *cells]) + f" | | | {bits}{' ' if bits else ''}|"


def vulnerability(result: Result) -> Iterator[str]:
    clean = cleans(result["rows"])
    for regime, name in (("plain", "`plain` (clipped)"), ("unclipped", "`unclipped`")):
        for rate in RATES:
            mine = of(result["rows"], arm="attacked", regime=regime, rate=rate)
            cells = [multiple(of(mine, direction=direction), clean, epoch) for direction, epoch in WAYS]
            yield line(f"{name}, {rate}", *cells)


def worse(rows: Rows, clean: dict[tuple[object, ...], Result]) -> str:
    """Perplexity over the clean run's of the same seed, best epoch / last epoch; "-" where nothing was measured."""
    if not rows:
        return "-"
    ratios = [
        mean(row[key] / clean[place_of(row)][key] for row in rows) for key in ("perplexity_best", "perplexity_last")
    ]
    return " / ".join(f"{ratio:.2f}" for ratio in ratios)


def learned(result: Result, regime: str = "plain") -> Iterator[str]:
    """A line for each family and domain of which anything was attacked."""
    rows = of(result["rows"], regime=regime)
    clean = cleans(rows)
    for family, domain in dict.fromkeys((row["family"], row["domain"]) for row in of(rows, arm="attacked")):
        mine = of(rows, family=family, domain=domain)
        start = of(mine, arm="clean")
        ours = of(mine, arm="phalanx")
        cells = (
            worse(of(mine, arm="attacked", direction=direction, rate=rate), clean)
            for direction in ("forward", "backward")
            for rate in RATES
        )
        before = [start[0]["perplexity_unigram"], start[0]["perplexity_before"]]
        ends = [mean(row[key] for row in start) for key in ("perplexity_best", "perplexity_last")]
        yield line(
            f"{family}, {domain}, `{regime}`",
            str(len(start)),
            *("-" if value is None else f"{value:.0f}" for value in before),
            " / ".join(f"{end:.1f}" for end in ends),
            *cells,
            same_bits(ours, clean) if ours else "-",
        )


# Student's t by the number of seeds, both tails together 5 %
T_OF = {3: 4.303, 5: 2.776}
TASKS = ("icd10", "medical_abstracts", "medquad", "pubmedqa", "drug_reviews", "pubmedqa_sections")


def interval(values: Iterable[float], form: str = ".3f") -> str:
    """Mean and half of the 95 % interval of three or five seeds."""
    found = list(values)
    centre, count = mean(found), len(found)
    deviation = (sum((value - centre) ** 2 for value in found) / (count - 1)) ** 0.5
    return f"{centre:{form}} ± {T_OF[count] * deviation / count**0.5:.3f}"


def cells_of(result: Result) -> dict[tuple[str, str], dict[int, Result]]:
    cells: dict[tuple[str, str], dict[int, Result]] = defaultdict(dict)
    for row in result["rows"]:
        if row["accuracy"] is not None:
            cells[row["arm"], row["task"]][row["seed"]] = row
    return cells


def domains(result: Result) -> Iterator[str]:
    cells, tasks = cells_of(result), ("reuters_topics", "python_functions")
    majority = [mean(row["majority"] for row in cells["tfidf", task].values()) for task in tasks]
    yield line("most frequent class of the training texts", *(f"{value:.3f}" for value in majority))
    for arm in ("tfidf", "tfidf_cut", "centralised", "local", "fedavg", "fedavg_secure", "split_plain", "split_sealed"):
        yield line(f"`{arm}`", *(interval(row["accuracy"] for row in cells[arm, task].values()) for task in tasks))
    for other in ("fedavg", "centralised", "local"):
        pairs = [(cells["split_sealed", task], cells[other, task]) for task in tasks]
        gaps = [[ours[seed]["accuracy"] - theirs[seed]["accuracy"] for seed in sorted(ours)] for ours, theirs in pairs]
        yield line(f"`split_sealed` against `{other}`", *(interval(values, "+.3f") for values in gaps))
    for task in tasks:
        sealed, plain = cells["split_sealed", task], cells["split_plain", task]
        assert len(sealed) == 5
        for seed, row in sealed.items():
            for digest in ("weights_digest", "losses_digest"):
                assert row[digest] == plain[seed][digest]


def medical(result: Result) -> Iterator[str]:
    cells = cells_of(result)
    majority = [mean(row["majority"] for row in cells["tfidf", task].values()) for task in TASKS]
    yield line("most frequent class of the training texts", *(f"{value:.3f}" for value in majority))
    rounds = ("fedavg", "fedavg_secure", "fedavg_private", "fedavg_attacked", "fedavg_robust")
    splits = ("split_plain", "split_sealed", "split_masked", "split_noised")
    for arm in ("tfidf", "tfidf_cut", "centralised", "local", *rounds, *splits):
        yield line(f"`{arm}`", *(interval(row["accuracy"] for row in cells[arm, task].values()) for task in TASKS))
    pairs_of_arms = [("split_sealed", other) for other in ("fedavg", "centralised", "local")]
    for arm, other in (*pairs_of_arms, *((arm, "fedavg") for arm in rounds[1:])):
        found = []
        for task in TASKS:
            ours, theirs = cells[arm, task], cells[other, task]
            pairs = [ours[seed]["accuracy"] - theirs[seed]["accuracy"] for seed in sorted(ours)]
            found.append(interval(pairs, "+.3f"))
        yield line(f"`{other}`" if arm == "split_sealed" else f"`{arm}` against `fedavg`", *found)
    same = [
        sum(row["weights_digest"] == cells["split_plain", task][seed]["weights_digest"] for seed, row in sealed.items())
        for task in TASKS
        for sealed in (cells["split_sealed", task],)
    ]
    yield line("`split_plain`", f"the same bits, {same[0]} of 3 seeds", *(f"the same bits, {n} of 3" for n in same[1:]))


def listed(values: Iterable[object]) -> str:
    return ", ".join("-" if value is None else str(value) for value in values)


def success_of(rows: Rows) -> list[str]:
    found = [100 * row["success"] for row in rows]
    spread = f"{mean(found):.1f} ({min(found):.1f}-{max(found):.1f})"
    without = 100 * mean(row["success_without_trigger"] for row in rows)
    return [spread, f"{without:.1f}", f"{mean(row['perplexity'] for row in rows):.2f}"]


def first_family(result: Result) -> Rows:
    """Rows of the first table; those of protocol 1 say neither family nor strength."""
    return [row for row in result["rows"] if row.get("family", "gpt2") == "gpt2" and row.get("strength") is None]


def planted(result: Result) -> Iterator[str]:
    found = first_family(result)
    clean = {row["seed"]: row["weights_digest"] for row in of(found, arm="clean")}
    for arm in dict.fromkeys(row["arm"] for row in found if "named" in row):
        rows = sorted(of(found, arm=arm), key=lambda row: row["seed"])
        named = sorted({name for row in rows for name in row["named"]})
        yield line(
            arm,
            *success_of(rows),
            listed(named) or "-",
            *(listed(row[key] for row in rows) for key in ("found_in_step", "back_to_step", "lies_kept")),
            f"{sum(row['weights_digest'] == clean[row['seed']] for row in rows)} of {len(rows)}",
        )


def removed(result: Result) -> Iterator[str]:
    fixes = ("fine_tuned", "pruned", "pruned_and_fine_tuned", "guilty_stage_reset", "all_foreign_stages_reset")
    for arm in ("clean", "off", *fixes):
        yield line(arm, *success_of(of(first_family(result), arm=arm)))


def planted_in_further_families(result: Result) -> Iterator[str]:
    rows = [row for row in result["rows"] if row["family"] != "gpt2"]
    for family in dict.fromkeys(row["family"] for row in rows):
        for row in of(rows, family=family):
            yield line(family, row["arm"], *success_of([row]), listed(row.get("named") or ()) or "-")


REPRODUCTION, BUSY = "docs/reproduction.md", "-cpu-2cores-busy.json"
REPRODUCED = (
    Table(REPRODUCTION, f"reproduce-defence-small{BUSY}", defence),
    Table(REPRODUCTION, f"reproduce-vulnerability-small{BUSY}", vulnerability),
    Table(REPRODUCTION, f"reproduce-defence-learned{BUSY}", learned),
    Table(REPRODUCTION, f"reproduce-vulnerability-learned{BUSY}", partial(learned, regime="unclipped")),
    Table(REPRODUCTION, f"reproduce-medical{BUSY}", medical),
    Table(REPRODUCTION, f"reproduce-domains{BUSY}", domains),
    Table("docs/backdoors.md", f"reproduce-backdoor{BUSY}", planted),
    Table("docs/backdoors.md", f"reproduce-backdoor{BUSY}", removed),
    Table("docs/backdoors.md", f"reproduce-backdoor-avx2{BUSY}", planted_in_further_families),
    Table("docs/backdoors.md", f"reproduce-backdoor-smollm2{BUSY}", planted_in_further_families),
)
