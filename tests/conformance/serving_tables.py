"""How the tables and sentences of the pages on marks and filters are made from their raw results."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.serve.filters.config import InputFilters, OutputFilters
from phalanx.serve.filters.table import INPUTS, OUTPUTS

MARKS, FILTERS = "marks-cpu-2cores-busy.json", "filters-cpu-2cores-busy.json"
ALERTS, SERVE = "alerts-cpu-2cores-busy.json", "serve-cpu-2cores-busy.json"
GATEWAY, SLOW_GATEWAY = "gateway-cpu-2cores.json", "gateway-avx2-cpu-2cores.json"
LAPTOP_ARMS = "laptop-arms-cpu-2cores-busy.json"
MARKS_PAGE, FILTERS_PAGE, WATCH_PAGE = "docs/marked_text.md", "docs/filters.md", "docs/serving_watch.md"
GATEWAY_SENTENCE = (
    "The engine alone took {:.2f} ms a request; through the gateway it was **{:.2f} ms** longer at the median and "
    "**{:.2f} ms** at the 99th percentile (goal 2), {:.2f} ms of CPU each, {:.1f} times the engine's time; with eight "
    "streams {:.1f} % of the throughput was lost (goal 3)."
)
SLOW_GATEWAY_SENTENCE = (
    "On a slower processor, where the engine alone took {:.2f} ms (`gateway-avx2-cpu-2cores.json`), the gateway added "
    "{:.2f} and {:.2f} ms and {:.2f} ms of CPU, beyond the goal; the whole was {:.1f} times the engine's time."
)
RATIO_SENTENCE = (
    "By CPU seconds this engine wrote {:.2f}, {:.2f} and {:.2f} times as many tokens as the best other one with 1, 8 "
    "and 32 streams in float32 (goal .9 of llama.cpp with 8), and {:.2f}, {:.2f} and {:.2f} times as many as llama.cpp "
    "with weights of 8 bits."
)
CROWD_SENTENCE = (
    "Of {:,} open streams {:,} were answered whole by the server, in {:.0f} s and {:.0f} MiB more than before, and "
    "{:,} through the gateway, in {:.1f} s and {:.0f} MiB. Of {} servers that were killed under load none lost a "
    "count: {} requests and {:,} tokens were counted where clients had got {} and {}."
)
LAPTOP_SENTENCE = (
    "After {:.0f}, {:.0f} and {:.0f} CPU seconds `phalanx laptop` had {:.2f} bits a byte, the loop of PyTorch in the "
    "same shape {:.2f}, and the loop in the shape of nanochat's CPU script, {:.1f} million parameters and {} steps, "
    "{:.2f}."
)
ALARM_SENTENCE = (
    "{:,} documents, each judged by one of 32 keys; {:,} were too short for a verdict. Of the others {} had a p-value "
    "of at most .01, {:.2f} %, where at most 1 % may."
)
COST_SENTENCE = (
    "A draw over 49,152 tokens took {:.2f} ms of CPU with a mark, {:.2f} ms by a seed alone and {:.2f} ms by torch's "
    "softmax and multinomial; at eight rows {:.2f}, {:.2f} and {:.2f} ms a token. The model took {:.0f} ms for a token "
    "of one text: beside a seeded draw the mark costs {:.2f} % of that, beside torch's {:.2f} %."
)
ATTACK_SENTENCE = "Of {} texts that a model recited from its index, {} were stopped, with at most {} characters out."
DOCUMENT_SENTENCE = "on {:,} documents of WikiText-2 and MedQuAD"
DRIFT_SENTENCE = (
    "Of {} servers with {:,} requests of one law each, {}, {} and {} had a false alarm of prompts, answers "
    "and refusals."
)
Result = dict[str, Any]


def line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def part(result: Result, name: str) -> list[Result]:
    return [row for row in result["rows"] if row["part"] == name]


def gateway_times(result: Result) -> list[float]:
    return [result["medians"][key] for key in ("added_p50_ms", "added_p99_ms", "gateway_cpu_ms")]


def gateway_ratio(result: Result) -> tuple[float, float]:
    """The engine's median time in milliseconds, and the time through the gateway as a multiple of it."""
    direct, through = (
        statistics.median(row[key] for row in result["rows"]) for key in ("direct_p50_ms", "gateway_p50_ms")
    )
    return direct, through / direct


def gateway_sentence(result: Result) -> Sequence[object]:
    direct, ratio = gateway_ratio(result)
    lost = 100 * max(0.0, result["gateway_share"]["lost_share"])
    return [direct, *gateway_times(result), ratio, lost]


def slow_gateway_sentence(result: Result) -> Sequence[object]:
    direct, ratio = gateway_ratio(result)
    return [direct, *gateway_times(result), ratio]


def ratio_sentence(result: Result) -> Sequence[object]:
    ratios = {(row["precision"], row["streams"], row["unit"]): row["best_peer"] for row in result["ratios"]}
    return [ratios[kind, streams, "tokens_per_cpu_s"] for kind in ("float32", "8 bits") for streams in (1, 8, 32)]


def crowd_sentence(result: Result) -> Sequence[object]:
    server, gateway = result["crowd"]
    kills = result["kills"]
    assert (kills["lost_requests"], kills["lost_tokens"]) == (0, 0)
    return [
        server["streams"],
        server["whole"],
        server["wall_s"],
        server["grown_mib"],
        gateway["whole"],
        gateway["wall_s"],
        gateway["grown_mib"],
        kills["kills"],
        kills["counted_requests"],
        kills["counted_tokens"],
        kills["answered_requests"],
        kills["received_tokens"],
    ]


def laptop_sentence(result: Result) -> Sequence[object]:
    *_, shaped = rows = result["rows"]
    first, second, third = (row["bits_per_byte"] for row in rows)
    return [*(row["cpu_s"] for row in rows), first, second, shaped["parameters"] / 1e6, shaped["steps"], third]


def serve_arms(result: Result) -> Iterator[str]:
    for kind in dict.fromkeys((row["precision"], row["arm"], row["streams"]) for row in result["rows"]):
        turns = [row for row in result["rows"] if (row["precision"], row["arm"], row["streams"]) == kind]
        units = ("tokens_per_cpu_s", "tokens_per_s", "first_ms", "token_ms")
        middles = (statistics.median(row[unit] for row in turns) for unit in units)
        yield line(
            *kind, *(f"{middle:,.1f}" if number < 2 else f"{middle:,.0f}" for number, middle in enumerate(middles))
        )


def marginal(result: Result) -> Iterator[str]:
    for row in part(result, "marginal"):
        p_value = f"{row['p_value']:.2f}" if row["p_value"] > 1e-3 else "below 1e-3"
        yield line(
            row["what"],
            f"{row['temperature']:g}",
            f"{row['keys']:,}",
            row["cells"],
            f"{row['chi_square']:.1f}",
            p_value,
        )


def alarms(result: Result) -> Iterator[str]:
    for row in part(result, "false alarms"):
        if row["way"] != "too short":
            counts = [row[f"at_{limit}"] for limit in ("0.01", "0.001", "1e-06")]
            share = f"{counts[0]} ({100 * counts[0] / row['documents']:.2f} %)"
            yield line(row["kind"], row["way"], f"{row['documents']:,}", share, *counts[1:])


def needed(result: Result) -> Iterator[str]:
    for row in part(result, "tokens needed"):
        yield line(f"{row['nats']:g}", row["texts"], row["median"], row["of_90_percent"], row["not_found"])


def quality(result: Result) -> Iterator[str]:
    for row in part(result, "quality"):
        gap = "-" if row["arm"].startswith("plain") else f"{row['gap']:+.2f} ± {row['gap_error']:.2f}"
        share = f"{100 * row['repeated']:.1f} %"
        yield line(
            row["arm"],
            row["texts"],
            f"{row['nats']:.2f}",
            gap,
            share,
            row["found"],
            f"{row['median_log10_p']:.1f}",
            row["same_tokens"],
        )


def edits(result: Result) -> Iterator[str]:
    for row in part(result, "robustness"):
        yield line(row["edit"], row["texts"], row["found"], row["at_0.01"], f"{row['median_log10_p']:.1f}")


def alarm_sentence(result: Result) -> Sequence[object]:
    rows = part(result, "false alarms")
    (judged,) = [row for row in rows if (row["kind"], row["way"]) == ("all", "deduplicated")]
    short = sum(row["documents"] for row in rows if row["way"] == "too short")
    hits = judged["at_0.01"]
    return [judged["documents"] + short, short, hits, 100 * hits / judged["documents"]]


def cost_sentence(result: Result) -> Sequence[object]:
    one, eight = part(result, "cost")
    (model,) = part(result, "model")
    times = [row[f"{way}_ms"] for row in (one, eight) for way in ("marked", "seeded", "torch")]
    shares = [100 * (one["marked_ms"] - one[f"{way}_ms"]) / model["ms_per_token"] for way in ("seeded", "torch")]
    return [*times, model["ms_per_token"], *shares]


def inputs(result: Result) -> Iterator[str]:
    defaults = InputFilters().model_dump()
    for row in result["rows"]:
        if row["way"] == "input":
            name = row["filter"]
            told = (f"`{name}`", defaults[name], INPUTS[name].attack) if name in INPUTS else ("all", "", "")
            yield line(*told, f"{row['mb_per_cpu_s']:.0f}", row["touched"])


def outputs(result: Result) -> Iterator[str]:
    defaults = OutputFilters().model_dump()
    for row in result["rows"]:
        if row["way"] == "output":
            name = row["filter"]
            told = (f"`{name}`", defaults[name], OUTPUTS[name].attack) if name in OUTPUTS else ("all", "", "")
            speeds = f"{row['mb_per_cpu_s']:.1f}", row["touched"], f"{row['us_per_piece']:.1f}"
            yield line(*told, *speeds, f"{row['held_characters']:.2f}")


def attack_sentence(result: Result) -> Sequence[object]:
    (row,) = [row for row in result["rows"] if row["way"] == "attack"]
    return [row["documents"], row["stopped"], row["max_out"]]


def document_sentence(result: Result) -> Sequence[object]:
    return [result["rows"][0]["documents"]]


def walked_hours(result: Result) -> Iterator[str]:
    for row in (*part(result, "ordinary"), *part(result, "walk")):
        alarms = f"{row['alarms']} of {row['keys']}"
        yield line(row["kind"], f"{row['requests_an_hour']:.0f}", f"{row['new_prompts_an_hour']:.0f}", alarms)


def drift_sentence(result: Result) -> Sequence[object]:
    (row,) = part(result, "drift")
    return [
        row["servers"],
        row["requests"],
        *(row[f"alarms_{name}"] for name in ("prompts", "completions", "refusals")),
    ]


SENTENCES = (
    ("docs/benchmarks.md", GATEWAY, GATEWAY_SENTENCE, gateway_sentence),
    ("docs/benchmarks.md", SLOW_GATEWAY, SLOW_GATEWAY_SENTENCE, slow_gateway_sentence),
    ("docs/benchmarks.md", SERVE, RATIO_SENTENCE, ratio_sentence),
    ("docs/laptop.md", LAPTOP_ARMS, LAPTOP_SENTENCE, laptop_sentence),
    ("docs/benchmarks.md", SERVE, CROWD_SENTENCE, crowd_sentence),
    (WATCH_PAGE, ALERTS, DRIFT_SENTENCE, drift_sentence),
    (MARKS_PAGE, MARKS, ALARM_SENTENCE, alarm_sentence),
    (MARKS_PAGE, MARKS, COST_SENTENCE, cost_sentence),
    (FILTERS_PAGE, FILTERS, ATTACK_SENTENCE, attack_sentence),
    (FILTERS_PAGE, FILTERS, DOCUMENT_SENTENCE, document_sentence),
)
ROWS = (
    (WATCH_PAGE, ALERTS, walked_hours),
    (MARKS_PAGE, MARKS, marginal),
    (MARKS_PAGE, MARKS, alarms),
    (MARKS_PAGE, MARKS, needed),
    (MARKS_PAGE, MARKS, quality),
    (MARKS_PAGE, MARKS, edits),
    (FILTERS_PAGE, FILTERS, inputs),
    (FILTERS_PAGE, FILTERS, outputs),
    ("docs/benchmarks.md", SERVE, serve_arms),
)
