"""How tables and sentences on exports, paraphrases of marked texts and ``phalanx laptop`` are made of raw results."""

from collections.abc import Iterator, Sequence
from typing import Any

EXPORT, PLANTED = "export-cpu-2cores-busy.json", "planted-rounding-cpu-2cores-busy.json"
PARAPHRASES, LAPTOP = "mark-paraphrases-cpu-2cores-busy.json", "laptop-cpu-2cores-busy.json"
EXPORT_PAGE, MARKS_PAGE, LAPTOP_PAGE = "docs/export.md", "docs/marked_text.md", "docs/laptop.md"
CLEAN_SENTENCE = (
    "{} exports of clean models of the same size: {} refused; fullest stretch at most {:.2f} times an even spread, "
    "regret at most {:.2f}."
)
LAPTOP_SENTENCE = (
    "A plan for {:.0f} minutes on {:,} bytes of WikiText took {:.0f} minutes of a busy machine and {:.1f} minutes of "
    "CPU: {:,} parameters, {} steps of pre-training, and {:.2f} bits for each byte of held-out text before and {:.2f} "
    "after it."
)
Result = dict[str, Any]


def line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def exports(result: Result) -> Iterator[str]:
    keys = dict.fromkeys((row["format"], row["precision"]) for row in result["rows"])
    for kind, precision in keys:
        rows = [row for row in result["rows"] if (row["format"], row["precision"]) == (kind, precision)]
        cells = {row["check"].partition(" (")[0]: row for row in rows}
        ids, chats = cells["tokenizer: special tokens read"], cells["chat template: ids"]
        perplexity, equal = cells["perplexity, reference text"], cells["greedy answers equal"]
        regret = next(row for check, row in cells.items() if "likelier" in check)
        refusals = cells["refusals of harmful prompts"]
        yield line(
            f"`{kind}` `{precision}`",
            f"{ids['after']:,} of {ids['before']:,}",
            f"{chats['after']} of {chats['before']}",
            cells["begin of text: chats"]["after"],
            f"{perplexity['before']:.2f}, {perplexity['after']:.2f}",
            f"{equal['after']} of {equal['before']}",
            f"{regret['after']:.3f}",
            f"{refusals['before']}, {refusals['after']}",
            rows[0]["state"],
        )


def planted(result: Result) -> Iterator[str]:
    for row in result["rows"]:
        if row["model"] != "clean":
            shares = [f"{100 * row[f'planted answers {side}']:.0f} %" for side in ("before", "after")]
            checks = row["refused by"].replace(": how much likelier ours were, nats a token", "").replace("; ", ", ")
            regret = f"{row['regret']:.2f}"
            yield line(
                row["model"], f"`{row['precision']}`", *shares, row["pile ratio"], regret, row["state"], checks or "-"
            )


def clean_sentence(result: Result) -> Sequence[object]:
    rows = [row for row in result["rows"] if row["model"] == "clean"]
    refused = sum(row["state"] == "refused" for row in rows)
    return [len(rows), refused, max(row["pile ratio"] for row in rows), max(row["regret"] for row in rows)]


def paraphrases(result: Result) -> Iterator[str]:
    for row in result["rows"]:
        cells = row["found"], row["at_0.01"], f"{row['median_log10_p']:.1f}"
        yield line(row["paraphrase"], row["texts"], f"{100 * row['kept_runs']:.0f} %", *cells)


def laptop_times(result: Result) -> Iterator[str]:
    for row in result["rows"]:
        if "planned_s" in row:
            yield line(f"`{row['phase']}`", f"{row['planned_s']:.0f} s", f"{row['real_s']:.0f} s")


def laptop_scores(result: Result) -> Iterator[str]:
    for row in result["rows"]:
        if "figure" in row:
            yield line(f"`{row['phase']}`", row["figure"], f"{row['before']:.2f}", f"{row['after']:.2f}")


def laptop_answers(result: Result) -> Iterator[str]:
    for row in result["answers"]:
        yield line(f"`{row['question']}`", f"`{row['answer']}`")


def laptop_sentence(result: Result) -> Sequence[object]:
    plan = result["plan"]
    (bits,) = [row for row in result["rows"] if row["phase"] == "pretrain" and "bits" in row.get("figure", "")]
    size = plan["train_bytes"] + plan["held_out_bytes"]
    minutes = [result["minutes"], size, result["wall_s"] / 60, result["cpu_s"] / 60]
    return [*minutes, result["parameters"], plan["pretrain"]["steps"], bits["before"], bits["after"]]


SENTENCES = (
    (EXPORT_PAGE, PLANTED, CLEAN_SENTENCE, clean_sentence),
    (LAPTOP_PAGE, LAPTOP, LAPTOP_SENTENCE, laptop_sentence),
)
ROWS = (
    (EXPORT_PAGE, EXPORT, exports),
    (EXPORT_PAGE, PLANTED, planted),
    (MARKS_PAGE, PARAPHRASES, paraphrases),
    (LAPTOP_PAGE, LAPTOP, laptop_times),
    (LAPTOP_PAGE, LAPTOP, laptop_scores),
    (LAPTOP_PAGE, LAPTOP, laptop_answers),
)
