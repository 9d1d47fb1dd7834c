"""Sentences of the docs with figures are made again from the raw results that they name."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import edge_tables
import pytest
import serving_tables

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


def served_attacks(result: Result) -> Sequence[object]:
    keys = [row for row in result["rows"] if row["attack"] == "fuzzed keys"]
    return [sum(row["requests"] for row in keys), sum(row["let_in"] for row in keys)]


def served_timing(result: Result) -> Sequence[object]:
    pairs = {row["pairs"] for row in result["rows"]}
    return [*pairs, *(p_value for row in result["rows"] for p_value in row["p_values"])]


def served_requests(result: Result) -> Sequence[object]:
    (row,) = result["rows"]
    failed = sum(count for status, count in row["statuses"].items() if int(status) >= 500)
    return [row["requests"], failed]


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


def over_clean(result: Result, epoch: str) -> list[float]:
    """Regime `overfit`, forward at 0.5: the mean of each arm's perplexity over the clean run's of the same seed."""
    key, rows = f"perplexity_{epoch}", [row for row in result["rows"] if row["regime"] == "overfit"]
    clean = {(row["family"], row["domain"], row["seed"]): row[key] for row in rows if row["arm"] == "clean"}
    found = []
    for arm, where in (
        *((arm, ("forward", 0.5)) for arm in ("attacked", "skip_layer", "oracle_drop")),
        ("clean_early_stopping", (None, None)),
    ):
        mine = [row for row in rows if row["arm"] == arm and (row["direction"], row["rate"]) == where]
        found.append(mean(row[key] / clean[row["family"], row["domain"], row["seed"]] for row in mine))
    return found


def overfitted(result: Result) -> Sequence[object]:
    return [*over_clean(result, "last"), *over_clean(result, "best")]


def guarded_bits(result: Result) -> Sequence[object]:
    def place(row: Result) -> tuple[object, ...]:
        return row["family"], row["domain"], row["regime"], row["seed"]

    clean = {place(row): row["weights_digest"] for row in result["rows"] if row["arm"] == "clean"}
    guarded = [row for row in result["rows"] if row["arm"] in ("phalanx", "phalanx_no_attacker")]
    return [sum(row["weights_digest"] == clean[place(row)] for row in guarded), len(guarded)]


def attempts_again(result: Result) -> Sequence[object]:
    by_arm = {
        arm: [row["redone_steps"] for row in result["rows"] if row["arm"] == arm and row["regime"] == "plain"]
        for arm in ("phalanx", "restart")
    }
    return [mean(by_arm["phalanx"]), mean(by_arm["restart"])]


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


def explained_offline(result):
    """What a reader makes of evidence."""
    counts = result["evidence"]["all"]
    return sum(counts.values()), counts["proved"], counts["refuted"], counts["not_provable"]


def searched(result: Result) -> Sequence[object]:
    """What the adversary has played, on the protocol of the account and on earlier ones."""
    total, earlier = result["sum"], result["earlier"]
    counts = total["schedules"], total["pairs"], total["cpu_s"], total["findings"]
    return [*counts, sum(each["schedules"] for each in earlier), sum(each["findings"] for each in earlier)]


def preset_costs(result: Result) -> Sequence[object]:
    """Extra CPU time of each preset, in percent of an unguarded run."""
    return [percent(one(result, preset=name)["extra_compute"]) for name in ("light", "standard", "strict")]


def met_at_once(result: Result) -> Sequence[object]:
    rows = [row for row in result["rows"] if row["attacked_steps"] and row["guard"] == "standard"]
    same = sum(row["steps_to_detection"] == 0 for row in rows)
    return [same, len(rows), sum(row["bit_identical"] for row in rows), len(rows)]


def met_by(preset: str) -> Callable[[Result], Sequence[object]]:
    def figures(result: Result) -> Sequence[object]:
        rows = [row for row in result["rows"] if row["attacked_steps"] and row["guard"] == preset]
        assert {row["false_accusations"] for row in rows} == {0}
        return [sum(row["steps_to_detection"] == 0 for row in rows), len(rows)]

    return figures


def preferred(result: Result) -> Sequence[object]:
    interval, (first, middle, last) = result["interval"], result["held_out"]
    assert interval["share"] == last["accuracy"] and last["step"] == result["steps"]
    shares = interval["share"], percent(0.95), interval["low"], interval["high"], middle["accuracy"]
    return [interval["of"], interval["count"], last["step"], *shares, middle["step"], first["accuracy"], last["kl"]]


def strictly_undone(result: Result) -> Sequence[object]:
    rows = [row for row in result["rows"] if row["guard"] == "strict"]
    attacked = [row for row in rows if row["attacked_steps"]]
    late = [row for row in attacked if row["steps_to_detection"] != 0]
    leagues = [row["attacked_steps"] for row in late if row["attack"] == "league"]
    assert (len(late), len(leagues), max(leagues), len(rows)) == (31, 24, 30, 688)
    same = sum(row["bit_identical"] for row in attacked)
    return [
        same,
        len(attacked),
        sum(row["false_accusations"] for row in rows),
        sum(row["audited_messages"] for row in rows),
    ]


def accused(result: Result) -> Sequence[object]:
    found = result["false_accusations_per_million"]
    return [found["false_accusations"], found["audited_messages_of_honest_companies"], found["audited_messages"]]


def restarted(result: Result) -> Sequence[object]:
    rows = [row for row in result["rows"] if row["arm"] == "restart"]
    assert {row["lies_missed"] for row in rows} == {0}
    return [sum(row["redone_steps"] for row in rows), sum(row["honest_accused"] for row in rows)]


def run_twice(result: Result) -> Sequence[object]:
    redone = {
        arm: [row["redone_steps"] for row in result["rows"] if row["arm"] == arm] for arm in ("phalanx", "restart")
    }
    assert set(redone["phalanx"]) == {4}
    return [4, sum(redone["restart"]) / len(redone["restart"])]


def missed_before(result: Result) -> Sequence[object]:
    attacked = {
        name: [
            row["bit_identical"] is True for row in result["rows"] if row["preset"] == name and row["attack"] != "none"
        ]
        for name in ("strict", "standard", "light")
    }
    found = result["false_accusations_per_million"]
    counts = [number for same in attacked.values() for number in (sum(same), len(same))]
    return [*counts, found["false_accusations"], found["audited_messages"]]


def tpm_path(result: Result) -> Sequence[object]:
    acts = {row["act"]: row for row in result["rows"]}
    whole = acts["whole path"]
    parts = [acts[name]["median_ms"] for name in ("quote", "unseal", "counter")]
    return [*(whole[key] for key in ("median_ms", "lowest_ms", "p99_ms", "median_cpu_ms")), *parts]


def first_step(result: Result) -> Sequence[object]:
    steps, certified = ([row[key] for row in result["rows"]] for key in ("first_step_s", "certified_s"))
    return [result["load"], min(steps), max(steps), result["median_s"], min(certified), max(certified)]


def in_one_chunk(result: Result) -> Sequence[object]:
    whole = [row for row in result["rows"] if row["chunk_mib"] == row["tensor_mib"]]
    assert [row["tensor_mib"] for row in whole] == [1, 2, 4, 8]
    return [percent(row[key]) for key in ("share_seal_median", "share_open_median") for row in whole]


def zero3(result: Result) -> Sequence[object]:
    (mine,) = [row for row in result["rows"] if row["arm"] == "phalanx" and row["layout"] == "dp=2 zero=3"]
    return [mine["over_peer"], mine["peer"]]


def memory_span(result: Result) -> Sequence[object]:
    ratios = [row["memory_ratio"] for row in result["rows"]]
    assert len(ratios) == 8
    return [min(ratios), max(ratios)]


def honest_again(result: Result) -> Sequence[object]:
    found = result["false_accusations_per_million"]
    return [found["false_accusations"], found["audited_messages"]]


def in_processes(result: Result) -> Sequence[object]:
    rows = result["rows"]
    assert {row["false_accusations"] for row in rows} == {0}
    return [sum(row["detected"] for row in rows), len(rows), sum(row["bit_identical"] for row in rows)]


PRESET_ROW = "| `{}`, {} | {:.1f} % | {:.1f} % | {:.1f} % | {:.1f} for {:.1f} | {:.1f} % | {:.2f} |"
PRESETS, STANDARD = "overhead-presets-cpu-2cores.json", "detection-partial-cpu-2cores-busy.json"
SPLIT, DEFENCE = "split-cpu-2cores-quick.json", "reproduce-defence-small-cpu-2cores-busy.json"
ECONOMY = "detection-economy-cpu-2cores.json"
STRICT = "detection-strict-cpu-2cores-busy.json"


def secure_sum(result: Result) -> Sequence[object]:
    (row,) = result["rows"]
    counts = (row["values"] / 1e6, row["clients"], row["neighbours"], row["clients"])
    seconds = (row["mask_cpu_s"], row["ns_per_value_and_mask"], row["server_take_cpu_s"], row["server_unmask_cpu_s"])
    exact = "exact" if row["bit_exact"] else "not exact"
    return (*counts, *seconds, row["bytes_per_value"], row["client_other_bytes"], exact)


def by_a_rule(result: Result) -> Sequence[object]:
    before, early, *_, last = result["held_out"]
    return (before["accuracy"], early["accuracy"], early["step"], last["step"], last["margin"], last["kl"])


def harm_scores(result: Result) -> Sequence[object]:
    texts = "requests and other texts"
    score, words = (one_harm(result, method=method, texts=texts) for method in ("classifier", "word list"))
    return [
        *per_cent(score["missed"], *score["missed_interval"]),
        score["harmful"],
        *per_cent(score["false_alarms"], *score["false_alarms_interval"]),
        score["harmless"],
        *per_cent(words["missed"], *words["missed_interval"]),
    ]


def harm_on_the_same_words(result: Result) -> Sequence[object]:
    prompts = one_harm(result, method="classifier", texts="prompts of the suite safety")
    answers = one_harm(result, method="classifier", texts="rejected and chosen answers")
    return [
        prompts["harmful"] + prompts["harmless"],
        *per_cent(prompts["missed"], prompts["false_alarms"]),
        *(value for row in (prompts, answers) for value in (row["area"], *row["area_interval"])),
    ]


def one_harm(result: Result, **what: object) -> Result:
    return one({"rows": [row for row in result["rows"] if row["part"] == "harm"]}, **what)


def per_cent(*shares: float) -> list[float]:
    return [100 * share for share in shares]


def quality_ablation(result: Result) -> Sequence[object]:
    arms = [row for row in result["rows"] if row["part"] == "ablation"]
    differences = [row for row in result["rows"] if row["part"] == "difference"]
    losses = {arm: [row["loss"] for row in arms if row["arm"] == arm] for arm in ("highest", "random", "lowest")}
    (tokens,), (asked,) = {row["tokens"] for row in arms}, {row["n"] for row in differences}
    return [
        tokens,
        asked,
        *map(mean, losses.values()),
        len(losses["random"]),
        # the ends that lie nearest to no difference
        max(row["high"] for row in differences if row["arm"] == "highest"),
        min(row["low"] for row in differences if row["arm"] == "lowest"),
    ]


def cohorts(result: Result) -> Sequence[object]:
    perplexities = [value for _, value in result["held_out_perplexity"]]
    return [
        result["asked_a_round"],
        result["sites"],
        result["steps"],
        result["sites_asked"],
        perplexities[0],
        perplexities[-1],
    ]


def several_objectives(result: Result) -> Sequence[object]:
    before, *_, last = result["held_out"]
    texts = [row[name]["perplexity"] for name in ("main", "answers") for row in (before, last)]
    pairs = [before["polite"]["accuracy"], last["polite"]["accuracy"], last["polite"]["kl"]]
    return [result["steps"], *texts, *pairs]


def economy_undoes(result: Result) -> Sequence[object]:
    rows = [row for row in result["rows"] if row["attacked_steps"]]
    ended = [row for row in rows if row["bit_identical"]]
    undone = [row["steps_to_detection"] for row in ended if row["undone_steps"]]
    return [len(rows), len(ended), len(undone), max(undone)]


def economy_proves(result: Result) -> Sequence[object]:
    counts = result["evidence"]["all"]
    return [result["false_accusations_per_million"]["false_accusations"], counts["proved"], sum(counts.values())]


def law_of_prices(result: Result) -> Sequence[object]:
    law = result["law"]
    upkeep, audits = (1e9 * law["parameter_s"], 1e9 * law["number_s"]), (1e3 * law["audit_s"], law["audited_share"])
    return (*upkeep, *audits, law["screened_share"], law["owner_share"], 1e9 * law["owner_parameter_s"])


def predicted_prices(result: Result) -> Sequence[object]:
    errors = [abs(row["law_error"]) for row in result["prices"] if row["law_error"] is not None]
    return [len(errors), sum(error <= 0.15 for error in errors), 100 * max(errors)]


def backdoor_on_another_processor(result: Result) -> Sequence[object]:
    rows = [row for row in result["rows"] if row["family"] == "gpt2"]
    undefended = [100 * row["success"] for row in rows if row["arm"] == "off"]
    guarded = [row["success"] for row in rows if row["arm"] in ("economy", "light", "standard", "strict")]
    tuned = [row["success"] for row in rows if row["arm"] == "screen"]
    return [len(result["rows"]), *undefended, len(guarded), 100 * max(guarded), len(tuned), 100 * max(tuned)]


def backdoor_in_a_model_of_others(result: Result) -> Sequence[object]:
    arms = {row["arm"]: row for row in result["rows"]}
    off, clean = arms["off"], arms["clean"]
    dearer = 100 * (off["perplexity"] / clean["perplexity"] - 1)
    return [100 * off["success"], off["sequences"], dearer]


def fine_tuned_model_of_others(result: Result) -> Sequence[object]:
    (row,) = (row for row in result["rows"] if row["arm"] == "fine_tuned")
    return [100 * row["success"], 100 * row["success_without_trigger"]]


def guard_over_a_model_of_others(result: Result) -> Sequence[object]:
    arms = {row["arm"]: row for row in result["rows"]}
    assert arms["standard"]["weights_digest"] == arms["clean"]["weights_digest"]
    return [arms["standard"]["found_in_step"], arms["standard"]["doubted_steps"]]


FIGURES = (
    Figures(
        "docs/backdoors.md",
        "reproduce-backdoor-smollm2-cpu-2cores-busy.json",
        "By a stage that is half of this model, the trigger works in {:.0f} % of {} texts with nobody looking, at a "
        "perplexity {:.1f} % above the clean run's",
        backdoor_in_a_model_of_others,
    ),
    Figures(
        "docs/backdoors.md",
        "reproduce-backdoor-smollm2-cpu-2cores-busy.json",
        "`standard` convicts the stage in step {}, after {} step in doubt, and the run ends with the clean run's bits.",
        guard_over_a_model_of_others,
    ),
    Figures(
        "docs/backdoors.md",
        "reproduce-backdoor-smollm2-cpu-2cores-busy.json",
        "Fine-tuning leaves {:.1f} % of it, where {:.1f} % of the same texts have the target without a trigger",
        fine_tuned_model_of_others,
    ),
    Figures(
        "docs/backdoors.md",
        "reproduce-backdoor-avx2-cpu-2cores-busy.json",
        "{} cells): with nobody looking the trigger works in {:.0f}, {:.0f} and {:.0f} % of texts with seeds 0, 1 and "
        "2, and in the {} trainings with a preset in at most {:.1f} %. In {} trainings of an attacker that lowers its "
        "strength against the screen of gradients (1, .3, .1 and .03) it works in at most {:.1f} %.",
        backdoor_on_another_processor,
    ),
    Figures(
        "docs/concepts/guard_costs.md",
        "overhead-law-cpu-2cores.json",
        "{:.1f} ns a step for each number that other hands train, {:.2f} ns for each number that crosses between "
        "stages; an audited microbatch {:.0f} ms and {:.2f} of the stage's work on it, {:.2f} with its weight "
        "gradient; a step that the owner redoes {:.2f} of the stage's work on it and {:.0f} ns for each number",
        law_of_prices,
    ),
    Figures(
        "docs/benchmarks.md",
        "overhead-law-cpu-2cores.json",
        "of {} prices {} are predicted within 15 %, the worst within {:.0f} %",
        predicted_prices,
    ),
    Figures(
        "docs/benchmarks.md",
        "overhead-law-avx2-cpu-2cores-busy.json",
        "a law fitted to them predicts {} of {} prices within 15 %, the worst, `economy` at the largest step, within "
        "{:.0f} %",
        lambda result: [predicted_prices(result)[index] for index in (1, 0, 2)],
    ),
    Figures(
        "docs/preferences.md",
        "dpo-example-cpu-2cores-busy.json",
        "the share preferred the right way round goes from {:.2f} to {:.2f} by step {}, and at step {} the margin is "
        "{:.2f} at a divergence of {:.2f} from the model before",
        by_a_rule,
    ),
    Figures(
        "docs/data_rules.md",
        "text-classifier-cpu-2cores-busy.json",
        "the score at .5 misses {:.1f} % ({:.1f} to {:.1f}) of the {} requests held out and flags {:.1f} % ({:.1f} to "
        "{:.1f}) of {:,} other texts (95 % intervals); the words of `bad_words` miss {:.1f} % ({:.1f} to {:.1f})",
        harm_scores,
    ),
    Figures(
        "docs/data_rules.md",
        "text-classifier-cpu-2cores-busy.json",
        "On the {} prompts of the suite `safety`, whose harmless half has the words of the harmful one, the score "
        "flags all of them: it misses {:.0f} % of the harmful ones and flags {:.0f} % of the harmless ones, with an "
        "area under the curve of {:.2f} ({:.2f} to {:.2f}). Trained on rejected against chosen answers its area is "
        "{:.2f} ({:.2f} to {:.2f})",
        harm_on_the_same_words,
    ),
    Figures(
        "docs/data_rules.md",
        "text-classifier-cpu-2cores-busy.json",
        "learns from {:,} tokens of a mixture. With the highest scores its loss on {} encyclopedia paragraphs is "
        "{:.2f}, drawn at random {:.2f}, with the lowest {:.2f} (means of {} seeds); in each seed the paired "
        "interval of the difference to random lies below {:.1f} for the highest and above {:.1f} for the lowest",
        quality_ablation,
    ),
    Figures(
        "docs/federated.md",
        "federated-cohorts-example-cpu-2cores-busy.json",
        "asks {} of {} sites in each of {} rounds, with masked sums: {} of them were asked at least once, and the "
        "held-out perplexity of a small GPT went from {:.0f} to {:.0f}",
        cohorts,
    ),
    Figures(
        "docs/preferences.md",
        "mixed-example-cpu-2cores-busy.json",
        "in {} steps the held-out perplexity of the manual falls from {:.0f} to {:.0f} and that of the answers from "
        "{:.0f} to {:.1f}, and the share of held-out pairs that are preferred the right way round goes from {:.2f} to "
        "{:.2f}, at a divergence of {:.2f}",
        several_objectives,
    ),
    Figures(
        "docs/preferences.md",
        "dpo-harmless-cpu-2cores-busy.json",
        "of {} held-out pairs it prefers {} the right way round after {} steps, {:.2f} ({:.0f} % interval {:.2f} to "
        "{:.2f}), after {:.2f} at step {} and {:.2f} before, at a divergence of {:.2f} from the untouched model",
        preferred,
    ),
    Figures(
        "docs/fuzzing.md",
        "adversary.json",
        "in its last account {} schedules, {} of them with two acts or more, in {} seconds of CPU, with {} findings; "
        "{} schedules in accounts of earlier protocols, with {} findings",
        searched,
    ),
    Figures("docs/benchmarks.md", STRICT, "`strict` met {} of {} in the first step with a lie", met_by("strict")),
    Figures("docs/benchmarks.md", STRICT, "`light` met {} of {} at once", met_by("light")),
    Figures(
        "docs/benchmarks.md",
        STRICT,
        "{} of {} with the bits of the undisturbed run; {} false accusations in {:,} audited messages",
        strictly_undone,
    ),
    Figures(
        "docs/benchmarks.md",
        ECONOMY,
        "of {} companies in which somebody lied or fell silent {} ended with the bits of the undisturbed run, {} of "
        "them with a lie that was applied and then undone, the longest after {} steps",
        economy_undoes,
    ),
    Figures(
        "docs/benchmarks.md",
        ECONOMY,
        "{} false accusations, {} of {} verdicts prove themselves offline",
        economy_proves,
    ),
    *(
        Figures(
            page,
            "detection-quick-cpu-2cores.json",
            "of {} verdicts {} prove themselves offline, {} are refuted, and {} rest on the owner's word",
            explained_offline,
        )
        for page in ("docs/benchmarks.md", "docs/guarantees.md")
    ),
    Figures(
        "docs/benchmarks.md",
        "detection-processes-cpu-2cores-busy.json",
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
    Figures(
        "docs/benchmarks.md",
        "overhead-cpu-2cores-quick.json",
        "`light` {:.1f} %, `standard` {:.1f} % and `strict` {:.1f} % more CPU time",
        preset_costs,
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
    Figures(
        "docs/reproduction.md",
        DEFENCE,
        "it runs {} steps twice where `restart` needs {:.0f} further attempts in a training",
        run_twice,
    ),
    Figures(
        "docs/benchmarks.md",
        "detection-presets-cpu-2cores-busy.json",
        "`strict` had the bits of the undisturbed run in {} of {} companies, `standard` in {} of {}, and the eighth "
        "ended because nobody was left to hold a stage (its note has more), `light` in {} of {}; {} false accusations "
        "in {:,} audited messages",
        missed_before,
    ),
    Figures(
        "docs/benchmarks.md",
        "tpm-path-cpu-2cores-busy.json",
        "the whole path {:.1f} ms (median; lowest {:.1f}, 99 in 100 within {:.1f}, CPU time of this process {:.1f}), "
        "quote {:.1f}, unseal {:.1f}, counter {:.1f}",
        tpm_path,
    ),
    Figures(
        "docs/benchmarks.md",
        "first-step-cpu-2cores.json",
        "with a load of {:.1f} on two cores, {:.1f} to {:.1f} s from token to step (median {:.1f}), of which {:.1f} to "
        "{:.1f} s until both were certified",
        first_step,
    ),
    Figures(
        "docs/sealed_split.md",
        "seal-cpu-2cores-busy.json",
        "in one chunk of 1, 2, 4 and 8 MiB, {:.0f}, {:.0f}, {:.0f} and {:.0f} % for sealing and {:.0f}, {:.0f}, {:.0f} "
        "and {:.0f} % for opening",
        in_one_chunk,
    ),
    Figures(
        "docs/benchmarks.md",
        "parallel-zero3-cpu-2cores-busy.json",
        "**{:.2f}** of the fastest peer, {}, in tokens/s",
        zero3,
    ),
    Figures(
        "docs/planning.md",
        "memory-cpu-2cores-busy-quick.json",
        "in eight layouts of a model of 42 million parameters on one to four ranks, planned / measured is {:.3f} to "
        "{:.3f}",
        memory_span,
    ),
    Figures(
        "docs/benchmarks.md",
        "detection-honest-partial-cpu-2cores-busy.json",
        "{} in {:,} (14 of the 26 honest companies",
        honest_again,
    ),
    Figures(
        "docs/benchmarks.md",
        "detection-honest-cpu-2cores-busy.json",
        "**{} false accusations in {:,} audited honest messages**",
        honest_again,
    ),
    Figures(
        "docs/reproduction.md",
        DEFENCE,
        "last epoch): `attacked` {:.2f} of clean, `skip_layer` {:.2f}, `oracle_drop` {:.2f}, `clean_early_stopping` "
        "{:.2f}; at the best epoch {:.2f}, {:.2f}, {:.2f} and {:.2f}.",
        overfitted,
    ),
    Figures("docs/reproduction.md", DEFENCE, "has the bits of the clean run in **{} of {}** trainings", guarded_bits),
    Figures(
        "docs/reproduction.md",
        DEFENCE,
        "In all {:,} attacked attempts of `restart`, forward and backward, the duplicated block raised the alarm and "
        "never over an honest one ({} honest stages accused)",
        restarted,
    ),
    Figures(
        "docs/reproduction.md",
        DEFENCE,
        "it runs {:.0f} steps twice where `restart` needs {:.0f} further attempts in a training",
        attempts_again,
    ),
    Figures("docs/reproduction.md", DEFENCE, "accused honest stages in {:,} of its {:,} alarms", false_alarms),
    *(Figures(*sentence) for sentence in (*serving_tables.SENTENCES, *edge_tables.SENTENCES)),
    Figures(
        "docs/serving_security.md",
        "served-attacks-cpu-2cores-busy.json",
        "of {:,} fuzzed keys, a third each at this server, the gateway before the stub, and the gateway before "
        "llama.cpp, {} were let in.",
        served_attacks,
    ),
    Figures(
        "docs/serving_security.md",
        "served-timing-llama-cpu-2cores.json",
        "{:,} pairs of prompts show no difference between what another owner has asked and what nobody has "
        "(p = {:.3f}, one round). Started with its own defaults it gives p = {:.3f} in the same run",
        served_timing,
    ),
    Figures(
        "docs/serving_security.md",
        "served-timing-cpu-2cores.json",
        "the same {:,} pairs give p = {:.3f}; through the gateway before the stub p = {:.3f} with salts and p = {:.3f} "
        "with the memory off.",
        served_timing,
    ),
    Figures(
        "docs/serving_security.md",
        "served-requests-cpu-2cores-busy.json",
        "Of {:,} requests that were generated from our OpenAPI file (`served-requests-cpu-2cores-busy.json`) {} failed "
        "inside.",
        served_requests,
    ),
    Figures(
        "docs/secure_aggregation.md",
        "secure-sum-cpu-2cores-busy.json",
        "{:.0f} million values, {} clients, {} neighbours each. A client's clipping, rounding, {} masks and digest "
        "take {:.2f} s of CPU, {:.1f} ns a value and mask; the server takes a deposit in {:.2f} s and the masks off in "
        "{:.2f} s. {:.0f} bytes a value and {:,} bytes a client besides; the sum is {} in every bit.",
        secure_sum,
    ),
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
