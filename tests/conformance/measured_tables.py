"""How the rows of the tables of `docs/` are made from the raw results that they name."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import edge_tables
import leak_tables
import serving_tables

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MIB = 2**20
Result = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A table of a page, and how the raw result gives its rows."""

    page: str
    result: str
    rows: Callable[[Result], Iterator[str]]

    def __str__(self) -> str:
        return f"{self.page}: {self.result}"

    def made_again(self) -> list[str]:
        return list(self.rows(json.loads((RESULTS / self.result).read_text(encoding="utf-8"))))


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def share(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{round(100 * value, digits) + 0.0:.{digits}f} %"  # no minus before a zero


def either(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def appraisal(result: Result) -> Iterator[str]:
    names = {"snp": "(Milan, report 2)", "tdx": "(quote 4)", "sgx": "(quote 3)", "nitro": "", "nv-gpu": "(Hopper)"}
    by_arm = {(row["kind"], row["arm"]): row for row in result["rows"]}
    for kind, which in names.items():
        cells = [f"`{kind}` {which}".strip()]
        for arm in ("warm", "cold"):
            row = by_arm[kind, arm]
            cells += [f"{row['median_ms']:.1f}, {row['p99_ms']:.0f}", f"{row['median_cpu_ms']:.1f}"]
        yield line(*cells)


def masked(result: Result) -> Iterator[str]:
    for row in result["rows"]:
        plain = row["cpu_ms"]["plain_fp32"]
        shares = [
            row["worker_of_plain_fp32"],
            row["online_of_plain_fp32"] - row["check_of_plain_fp32"],
            row["check_of_plain_fp32"],
            row["cpu_ms"]["pad"] / plain,
            row["cpu_ms"]["pad_os"] / plain,
        ]
        size = f"{row['rows']} x {row['inner']:,} x {row['columns']:,}"
        errors = [error(row["error_masked"]), error(row["error_bf16"])]
        yield line(size, f"{plain:.1f}", *(f"{value:.2f}" for value in shares), *errors)


def error(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")


def split(result: Result) -> Iterator[str]:
    by_mode = {(row["mode"], row["width"], row["layers"], row["wire"]): row for row in result["rows"]}
    for (mode, width, layers, wire), row in by_mode.items():
        if mode == "plaintext":
            sealed = by_mode["sealed", width, layers, wire]
            yield line(
                f"{width}, {layers}, {row['seq']}, {wire}",
                f"{row['step_s']:.3f} s",
                f"{sealed['step_s']:.3f} s",
                share(sealed["crypto_share"], 2),
                f"{share(sealed['security_share'], 2)} ({share(row['security_share'], 2)})",
            )


def memory(result: Result) -> Iterator[str]:
    for row in result["rows"]:
        found, planned = row["peak_memory_bytes"], row["planned_memory_bytes"]
        yield line(row["layout"], f"{found / MIB:.0f}", f"{planned / MIB:.0f}", f"{row['memory_ratio']:.3f}")


def guard_of(row: Result) -> str:
    if row["mode"] != "phalanx":
        return f"`{row['mode']}`"
    owner = f", owner 1/{1 / row['owner_audit_rate']:.0f}" if row["owner_audit_rate"] else ""
    upkeep = "" if row["shadow"] == "gradient" else f", `{row['shadow']}`"
    rates = f"q = 1/{1 / row['q']:.0f}, p = 1/{1 / row['p']:.0f}"
    return rates + owner + upkeep


def two(first: float, second: float) -> str:
    return f"{share(first)[:-2]} / {share(second)}"


def at_expected(row: Result) -> float:
    """How much less, or more, at the number of audits that is expected."""
    scaled: float = row["part_audit"] * (expected_audits(row) / row["audits_per_step"] - 1)
    return scaled


def expected_audits(row: Result) -> float:
    """An owner's audit of a step counts as M, where the file expects it once."""
    more: float = row["owner_audit_rate"] * (row["M"] - 1) * (row["K"] - 2)
    return more + row["expected_audits_per_step"]


def wide(result: Result) -> Iterator[str]:
    for row in result["rows"]:
        if row["mode"] != "unguarded":
            more = at_expected(row)
            yield line(
                str(row["K"]),
                str(row["M"]),
                guard_of(row),
                two(row["extra_compute"], row["extra_over_unguarded"]),
                f"{row['audits_per_step']:.1f} / {row['expected_audits_per_step']:.1f}",
                two(row["extra_compute"] + more, row["extra_over_unguarded"] + more),
                share(row["part_copies_and_other"]),
                share(row["extra_bytes"]),
                share(row["extra_wall"]),
            )


def overhead(result: Result) -> Iterator[str]:
    for row in result["rows"]:
        if row["mode"] == "unguarded":
            continue
        audits = expected = formula = "-"
        if row["mode"] != "statistics":
            more = at_expected(row)
            audits = f"{row['audits_per_step']:.1f} / {expected_audits(row):.1f}"
            expected = two(row["extra_compute"] + more, row["extra_over_unguarded"] + more)
            formula = share(row["predicted_extra_compute"])
        redone = f", {row['recovery_steps_redone']} steps redone" if row["recovery_steps_redone"] else ""
        yield line(
            str(row["K"]),
            str(row["M"]),
            guard_of(row),
            two(row["extra_compute"], row["extra_over_unguarded"]),
            audits,
            expected,
            formula,
            *(share(row[key]) for key in ("extra_bytes", "extra_bytes_shadow", "extra_memory", "extra_wall")),
            f"{row['recovery_s']:.1f} s{redone}",
        )


def pipeline(result: Result) -> Iterator[str]:
    arms = {row["arm"]: row for row in result["rows"] if row["model"] == "scratch-10m"}
    plain, light, full = arms["unguarded"], arms["guarded_light"], arms["guarded_full"]
    ratio = plain["tokens_ratio_to_plain"], plain["tokens_ratio_to_plain_min"], plain["tokens_ratio_to_plain_max"]
    signed = light["part_hashing"] + light["part_signing"]
    parts = light["part_audit"], light["part_shadow_upkeep"], light["part_state_digest"], signed
    yield line(
        "scratch-10m",
        "{:.3f} ({:.3f}-{:.3f})".format(*ratio),
        share(light["extra_compute"]),
        ", ".join(f"{100 * part:.1f}" for part in parts) + " %",
        share(full["extra_compute"]),
    )


def layouts(result: Result) -> Iterator[str]:
    for row in result["rows"]:
        if row.get("tokens_per_s") is not None:
            mib = row.get("peak_memory_bytes") and row["peak_memory_bytes"] / MIB
            yield line(
                row["layout"],
                row["arm"],
                either(row.get("max_rel_loss_diff"), ".1e"),
                either(row["tokens_per_s"], ".0f"),
                either(row.get("over_peer"), ".2f"),
                either(row.get("cpu_s"), ".2f"),
                either(mib, ".0f"),
                either(row.get("memory_ratio"), ".2f"),
            )


def screen(result: Result) -> Iterator[str]:
    lies = ("gradient_sign", "gradient_scale", "gradient_topk", "zero", "scale 1.01")
    for row in result["rows"]:
        text = "text" if row["is_text"] else "random tokens"
        honest = f"{row['doubted']['none'] * row['steps']:.0f} of {row['steps']}"
        found = (share(row["doubted"][lie], 0) for lie in lies)
        yield line(f"width {row['width']}, {text}, {row['microbatches']}", honest, *found)


def leaks(result: Result) -> Iterator[str]:
    attacks = ("nearest_neighbour", "linear_map", "trained_inverter", "candidate_search")
    for row in result["summary"]:
        views = [either(percent(row[view]), ".1f") for view in ("plaintext", "sealed", "masked")]
        by = "-" if row["plaintext_attack"] is None else row["plaintext_attack"].replace("_", " ")
        cut = "0 (embedding)" if row["depth"] == 0 else str(row["depth"])
        others = [either(percent(row[name]), ".1f") for name in ("chance", *attacks)]
        yield line(cut, views[0], by, *views[1:], *others)


def percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def goodput(result: Result) -> Iterator[str]:
    for mean in ("15", "30", "60", "300"):
        shares = result["goodput"][mean], result["goodput_checkpoint_restart"][mean]
        yield " | ".join(share(value, 0) for value in shares) + " |"


def kills(result: Result) -> Iterator[str]:
    rows = [row for row in result["rows"] if row["what"] == "kill"]
    runs = {(row["seed"], row["asynchronous_checkpoints"]): row["bit_identical"] for row in rows}
    counts = result["kills"]
    noticed, after, done = ([row[key] for row in rows] for key in ("noticed_s", "after_detection_s", "recovery_s"))
    points = ("forward", "backward", "audit", "commit", "checkpoint")
    by_point = (f"{p} {median(row['after_detection_s'] for row in rows if row['point'] == p):.1f}" for p in points)
    below = sum(seconds < 2 for seconds in after)
    yield f"| {len(rows)} kills in ten runs, {counts['by_point']['audit']} at each point | |"
    yield line("runs that ended with the bits of the undisturbed one", f"{sum(runs.values())} of {len(runs)}")
    lost = counts["samples_lost"] + counts["samples_doubled"]
    figures = f"{lost}; {counts['steps_lost']}; {counts['false_accusations']}"
    yield line("sequences lost or doubled; steps lost; accusations", figures)
    yield line(
        "from the death until the owner had noticed it", f"median {median(noticed):.2f} s, worst {max(noticed):.2f} s"
    )
    details = f"({', '.join(by_point)}), worst {max(after):.1f} s; below 2 s in {below} of {len(rows)}"
    yield line("from then until the step was done", f"median {median(after):.2f} s {details}")
    yield line("from the death until the step was done", f"median {median(done):.2f} s, worst {max(done):.1f} s")


def slow_line(result: Result) -> Iterator[str]:
    for row in result["rows"]:
        turns = row["wall_over_unguarded_of_each_turn"]
        yield line(
            "unguarded" if row["shadow"] is None else f"`{row['shadow']}`",
            f"{row['bytes_per_step'] / 1e6:.1f} MB",
            f"{row['wall_s_per_step']:.1f} s",
            f"{row['wall_over_unguarded']:.2f} ({min(turns):.2f}-{max(turns):.2f})",
        )


def split_line(result: Result) -> Iterator[str]:
    rows = {row["arm"]: row for row in result["rows"]}
    for name, row in rows.items():
        plain = rows["plaintext-large" if name.endswith("large") else "plaintext"]
        security = sum(row[part] for part in ("cipher_s", "digest_s", "framing_s", "signing_s", "meeting_s"))
        yield line(
            f"`{name}`",
            f"{row['step_s']:.2f} s ({row['step_s_least']:.2f}-{row['step_s_most']:.2f})",
            f"{row['step_s'] / plain['step_s']:.2f}",
            f"{row['line_bytes'] / 1e6:.2f} MB",
            f"{row['line_bytes'] / plain['line_bytes']:.3f}",
            f"{1e3 * security:.1f} ms",
            f"{1e3 * row['appraise_s']:.0f} ms",
        )
        if row["mode"] == "sealed":
            assert row["weights_digest"] == plain["weights_digest"] is not None


BENCHMARKS, BUSY = "docs/benchmarks.md", "-cpu-2cores-busy.json"


def presets(result: Result) -> Iterator[str]:
    """What a preset costs, in the words of a user: no parts, no expectations."""
    for row in result["rows"]:
        if row["preset"] is not None:
            found = (row["extra_compute"], row["extra_expected"], row["extra_memory"], row["extra_wall"])
            more = f"{1 + row['extra_bytes']:.2f} times"
            yield line(f"`{row['preset']}`", str(row["M"]), *(share(value, 0) for value in found), more)


LAW, SLOW_LAW = "overhead-law-cpu-2cores.json", "overhead-law-avx2-cpu-2cores-busy.json"


def prices_by_size(result: Result) -> Iterator[str]:
    """CPU time that each preset adds to a step, and the bytes of the cheapest and of the default one, by its size."""
    rows = {(row["model"], row["tokens"], row["preset"]): row for row in result["prices"]}
    for model, tokens in dict.fromkeys((model, tokens) for model, tokens, _ in rows):
        cpu = (share(rows[model, tokens, name]["extra_cpu"]) for name in ("economy", "light", "standard", "strict"))
        size = (share(rows[model, tokens, name]["extra_bytes"], 0) for name in ("economy", "standard"))
        yield line(model, f"{tokens:,}", *cpu, *size)


def prices(result: Result) -> Iterator[str]:
    for row in result["prices"]:
        if row["extra_cpu"] is not None:
            cpu = (share(row[name]) for name in ("extra_cpu", "extra_cpu_by_law"))
            yield line(row["model"], f"{row['tokens']:,}", f"`{row['preset']}`", *cpu)


def price_parts(result: Result) -> Iterator[str]:
    """The extra CPU time of an arm by part, as shares of its unguarded arm; they add up."""
    parts = ("audits", "shadows", "undo_copies", "states", "messages", "transport", "coordination", "same_work")
    for row in result["rows"]:
        if row["arm"] in ("economy", "standard"):
            base = row["cpu_s"] - row["extra_s"]
            seconds = (row["extra_s"], *(row[f"more_{part}_s"] for part in parts), row["not_attributed_s"])
            yield line(row["model"], f"{row['tokens']:,}", f"`{row['arm']}`", *(share(s / base) for s in seconds))


def seal_in_short(result: Result) -> Iterator[str]:
    """What sealing or masking costs a step, beside the same split in plain text."""
    rows = {(row["mode"], row["width"], row["layers"], row["wire"]): row for row in result["rows"]}
    for (mode, *shape), row in rows.items():
        if mode != "plaintext":
            plain = rows["plaintext", *shape]
            width, layers, wire = shape
            more = row["bytes_per_step"] - plain["bytes_per_step"]
            seconds = (f"{one['step_s']:.2f}\u00a0s" for one in (plain, row))
            yield line(mode, f"{width}, {layers}, {wire}", *seconds, share(row["crypto_share"], 2), f"{more:,.0f}")


COSTS = "docs/concepts/guard_costs.md"
FEDERATED = "federated-cpu-2cores.json"


def update_attacks(result: Result) -> Iterator[str]:
    found = {(row["attack"], row["defence"]): row for row in result["rows"]}
    for attack in dict.fromkeys(row["attack"] for row in result["rows"]):
        rows = [found[attack, way] for way in ("undefended", "median", "multi_krum", "nnm+trimmed_mean", "caf")]
        losses = (either(row["loss"], ".2f") for row in rows)
        works = (f" (trigger works: {share(row['trigger'], 0)})" if row["trigger"] else "" for row in rows)
        cells = (loss + shown for loss, shown in zip(losses, works, strict=True))
        refused, counted = rows[2]["refused"], rows[2]["counted"]
        yield line(f"`{attack}`", *cells, f"{refused:.0f}", "-" if attack == "none" else share(counted, 0))


def extraction(result: Result) -> Iterator[str]:
    for row in result["rows"]:
        figures = (f"{row[key]:.2f}" for key in ("f1", "precision", "recall", "lowest_f1"))
        yield line(row["extractor"], row["package"], str(row["pages"]), *figures)


def posttrain(result: Result) -> Iterator[str]:
    for row in result["rows"]:
        cells = [either(row[key], ".2f") for key in ("speed_of_phalanx", "memory_of_phalanx")]
        peak = "-" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / MIB:.0f}"
        yield line(
            row["objective"],
            f"`{row['arm']}`",
            f"{row['tokens_per_s']:.0f}",
            f"{row['tokens_per_cpu_s']:.0f}",
            peak,
            *cells,
            share(row["extra_over_unguarded"], 0),
            f"{row['max_rel_loss_diff']:.0e}",
        )


def rounds(result: Result) -> Iterator[str]:
    for row in result["rows"]:
        over = [either(row[key], ".2f") for key in ("over_training_s", "cpu_over_training_s")]
        size = "-" if row["bytes"] is None else f"{row['bytes'] / 1000:.0f}"
        cells = [either(row["loads_after_first_turn"], ".0f"), either(row["largest_loss_difference"], ".0e")]
        yield line(row["arm"], f"{row['wall_s']:.2f}", f"{row['cpu_s']:.2f}", *over, size, *cells)


def private_steps(result: Result) -> Iterator[str]:
    for row in result["privacy"]:
        yield line(f"`{row['clipping']}`", f"{row['cpu_s']:.2f}", either(row["over_none"], ".2f"))


def collectives(result: Result) -> Iterator[str]:
    ways = ("all_reduce", "all_reduce_ring", "all_reduce_halving_doubling", "all_reduce_direct", "gather_to_one")
    by_way = {(row["ranks"], row["bytes"], row["op"]): row for row in result["rows"]}
    for ranks, size in sorted({(ranks, size) for ranks, size, _ in by_way}):
        timed = (by_way[ranks, size, way] for way in ways)
        cells = [f"{1000 * row['seconds']:.2f} ({1000 * row['cpu_s']:.2f})" for row in timed]
        yield line(str(ranks), f"{size:,}", *cells)


def transports(result: Result) -> Iterator[str]:
    base = next(row for row in result["rows"] if (row["defence"], row["lie"]) == ("none", "none"))
    for row in result["rows"]:
        found = (row["attacked_steps"], row["alarms"], row["honest_accused"], row["missed_steps"])
        server = row["server_sent_bytes"]
        yield line(
            f"`{row['defence']}`",
            row["lie"],
            *map(str, found),
            either(row["ended_in_step"], "d"),
            f"{row['sent_bytes'] / MIB:.1f}",
            f"{row['sent_bytes'] / base['sent_bytes']:.2f}",
            "-" if server is None else f"{server / MIB:.1f}",
            f"{row['stages_cpu_s']:.1f}",
            either(row["server_cpu_s"], ".1f"),
            f"{row['duplicate_bytes'] / MIB:.1f}",
        )


def zero_pairs(result: Result) -> Iterator[str]:
    homes = {"none": "on the device", "cpu": "in memory", "nvme": "in files"}
    for row in result["rows"]:
        assert row["offload_optimizer"] == row["offload_parameters"]
        yield line(
            f"`[{row['section']}]` zero {row['zero']}",
            homes[row["offload_optimizer"]],
            error(row["max_rel_loss_diff"]),
            either(row["over_own"], ".2f"),
            f"{row['cpu_s']:.2f}",
            f"{row['sent_bytes_per_step'] / 1e6:.0f}",
            f"{row['peak_memory_bytes'] / MIB:.0f}",
        )


def spot(result: Result) -> Iterator[str]:
    by_arm = {(row["stages"], row["shape"], row["arm"], row["restart_s"]): row for row in result["rows"]}
    guarded = [f"{shadows}, {way}" for way in ("cut anew", "fixed stages") for shadows in ("two shadows", "one shadow")]
    arms = [*((arm, None) for arm in guarded), *(("checkpoint restart", seconds) for seconds in (60.0, 300.0))]
    for stages, shape in dict.fromkeys((row["stages"], row["shape"]) for row in result["rows"]):
        rows = [by_arm[stages, shape, *arm] for arm in arms]
        cells = [
            f"{share(row['share_of_undisturbed'], 0)}, {share(row['share_of_own_undisturbed'], 0)}" for row in rows
        ]
        returns = [by_arm[stages, shape, arm, None]["returns_to_a_checkpoint"] for arm in guarded[2:]]
        yield line(str(stages), f"`{shape}`", *cells, " and ".join(map(str, returns)))


TABLES = (
    *(Table(page, result, rows) for page, result, rows in (*serving_tables.ROWS, *edge_tables.ROWS, *leak_tables.ROWS)),
    Table("docs/data_sources.md", f"extraction{BUSY}", extraction),
    Table(COSTS, "overhead-presets-cpu-2cores.json", presets),
    Table(COSTS, LAW, prices_by_size),
    Table(COSTS, SLOW_LAW, prices_by_size),
    Table(COSTS, "split-cpu-2cores-quick.json", seal_in_short),
    Table(COSTS, f"masked{BUSY}", masked),
    Table(BENCHMARKS, f"appraisal{BUSY}", appraisal),
    Table(BENCHMARKS, f"masked{BUSY}", masked),
    Table(BENCHMARKS, "split-cpu-2cores-quick.json", split),
    Table(BENCHMARKS, "memory-cpu-2cores-busy-quick.json", memory),
    Table(BENCHMARKS, "overhead-cpu-2cores.json", overhead),
    Table(BENCHMARKS, LAW, prices),
    Table(BENCHMARKS, LAW, price_parts),
    Table(BENCHMARKS, "overhead-wide-cpu-2cores.json", wide),
    Table(BENCHMARKS, "pipeline-cpu-2cores-quick.json", pipeline),
    Table(BENCHMARKS, "parallel-cpu-2cores-quick.json", layouts),
    Table(BENCHMARKS, "posttrain-cpu-2cores.json", posttrain),
    Table(BENCHMARKS, FEDERATED, rounds),
    Table(BENCHMARKS, FEDERATED, private_steps),
    Table("docs/federated.md", FEDERATED, rounds),
    Table(BENCHMARKS, f"gradient-screen{BUSY}", screen),
    Table(BENCHMARKS, f"slow-line{BUSY}", slow_line),
    Table("docs/sealed_split.md", f"split-line{BUSY}", split_line),
    Table(BENCHMARKS, "chaos-cpu-2cores.json", kills),
    Table(BENCHMARKS, "chaos-cpu-2cores.json", goodput),
    Table(BENCHMARKS, "spot.json", spot),
    Table("docs/leaks.md", f"leaks-smollm2-135m-quick{BUSY}", leaks),
    Table("docs/leaks.md", f"leaks-smollm2-135m-partial{BUSY}", leaks),
    Table("docs/federated.md", f"update-attacks{BUSY}", update_attacks),
    Table("docs/left_out.md", f"collectives{BUSY}", collectives),
    Table("docs/reproduction.md", f"paper-transports{BUSY}", transports),
    Table("docs/parallel.md", f"deepspeed-zero{BUSY}", zero_pairs),
)
