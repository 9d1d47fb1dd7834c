"""``report.html``: one page that holds everything and opens offline."""

import math
from pathlib import Path
from typing import Any

from phalanx.report.bars import Bar, bin_rows, name_bars, step_bars
from phalanx.report.checks import checks_section, num_in_doubt, proven_steps
from phalanx.report.figures import (
    format_amount,
    format_count,
    format_duration,
    format_plural,
    format_size,
    parse_number,
    short_text,
)
from phalanx.report.headline import (
    STATUS_WORDS,
    ending_sentences,
    has_guard,
    headline_sentence,
    headline_tiles,
    run_status,
    worse_facts,
)
from phalanx.report.histograms import histograms_section
from phalanx.report.loss import curve_of, loss_chart
from phalanx.report.read import Row, RunRecord, read_run
from phalanx.report.shell import make_section, page_shell, write_page
from phalanx.report.svg import Markup, PlotFrame, Shape, make_element
from phalanx.report.tables import cost_table, make_table, sites_section, stage_table, validation_table
from phalanx.report.timeline import event_timeline
from phalanx.report.verdicts import verdict_list

_NUM_COLOURS = 6
_MAX_LINKS = 20
_MAX_SAMPLES = 8
_CLAIMED = " (claimed)"


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into a run directory, finished or not.

    Guarantees:
        The page loads nothing from elsewhere and runs no script; text from files is escaped. What is missing
        is said on the page. It draws the audit log as it is, and says how many steps it proves.
    """
    return write_page(run_dir / "report.html", report_page(run_dir))


def report_page(run_dir: Path) -> str:
    """Return the page of a run directory, as `write_report` writes it."""
    record = read_run(run_dir)
    record.proof = proven_steps(run_dir, record)
    return render_run_report(record)


def render_run_report(record: RunRecord) -> str:
    """Return the whole page."""
    sections = [
        _page_top(record),
        _note_section(record),
        _loss_section(record),
        _sample_section(record),
        sites_section(record),
        histograms_section(record),
        *(_verdict_sections(record) if has_guard(record) else ()),
        checks_section(record),
        _phase_section(record),
        _cost_section(record),
        _link_section(record),
        _stage_section(record),
        _event_section(record),
        _settings_section(record),
    ]
    return page_shell(f"{short_text(record.name, 80)} · Phalanx", [part for part in sections if part is not None])


def _page_top(record: RunRecord) -> Markup:
    state = run_status(record)
    pill = make_element("span", {"class": f"status {state}"}, STATUS_WORDS.get(state, "Not finished"))
    steps = num_in_doubt(record)
    doubt = (
        [" ", make_element("span", {"class": "status failed"}, f"{format_plural(steps, 'step')} in doubt")]
        if steps
        else []
    )
    doubt += [" ", make_element("span", {"class": "status failed"}, "worse than before")] if worse_facts(record) else []
    cards = [
        make_element(
            "div",
            {"class": "tile"},
            make_element("div", {"class": "name"}, name),
            make_element("div", {"class": "value"}, value),
            make_element("div", {"class": "name"}, remark),
        )
        for name, value, remark in headline_tiles(record)
    ]
    return make_element(
        "header",
        {},
        make_element(
            "p",
            {"class": "run"},
            "Phalanx run ",
            make_element("bdi", {}, short_text(record.name, 120)),
            " ",
            pill,
            *doubt,
        ),
        make_element("h1", {}, headline_sentence(record)),
        make_element("div", {"class": "tiles"}, *cards) if record.summary else "",
    )


def _loss_section(record: RunRecord) -> Markup | None:
    unigram = parse_number(record.summary.get("unigram_perplexity"))
    levels = [("unigram model", math.log(unigram))] if unigram is not None and unigram > 0 else []
    drawn = loss_chart(PlotFrame(height=340.0), [curve_of(record.metrics, "training")], levels)
    if drawn is None:
        return _absent_section("Loss", "No finite loss was recorded.")
    sets = validation_table(record)
    marks = ["Attacked steps are marked; a repaired step used the exact gradient."] if has_guard(record) else []
    remark = " ".join([*marks, *ending_sentences(record)])
    return make_section("Loss", remark, drawn, "" if sets is None else sets)


def _sample_section(record: RunRecord) -> Markup | None:
    """The latest texts that the model wrote."""
    recorded = [row for row in record.metrics if isinstance(row.get("samples"), list)]
    if not recorded:
        return None
    texts = [sample for sample in recorded[-1]["samples"][:_MAX_SAMPLES] if isinstance(sample, dict)]
    rows = [[short_text(sample.get("prompt"), 1000), short_text(sample.get("text"), 4000)] for sample in texts]
    remark = f"After step {format_count(recorded[-1]['step'] + 1)}; metrics.jsonl has those of every validation."
    return make_section("Texts of the model", remark, make_table(["Prompt", "Continuation"], rows))


def _verdict_sections(record: RunRecord) -> list[Markup | None]:
    """What the guard found, and how often it looked."""
    remark = "Guilty parties and their lies; open one to see its evidence."
    return [make_section("Verdicts", remark, verdict_list(record)), _audit_section(record)]


def _audit_section(record: RunRecord) -> Markup | None:
    if not _sum_column(record.metrics, "audits"):
        return _absent_section("Audits", f"No audit was recorded. {short_text(record.proof, 600)}")
    bars, signs = [], set()
    for group in bin_rows(record.metrics):
        audits, alarms = _sum_column(group, "audits"), _sum_column(group, "alarms")
        repeats = sum(max(0.0, (parse_number(row.get("attempts")) or 1.0) - 1.0) for row in group)
        sign: tuple[Shape, str] | None = ("triangle", "kbad fbad") if alarms else None
        signs |= {sign} if sign else set()
        counts = f"{format_count(audits)} audits, {format_count(alarms)} alarms, {format_count(repeats)} repeats"
        title = f"{_describe_steps(group)}\n{counts}"
        bars.append(Bar(*_group_ends(group), [("f0", audits / len(group))], title, sign))
    items: list[tuple[Shape, str, str]] = [("square", "k0 f0", "audits")]
    items += [(shape, css, "alarm") for shape, css in signs]
    drawn = step_bars(PlotFrame(height=220.0), bars, "audits a step", items, "Audits of each step")
    return make_section("Audits", f"{_describe_bins(record.metrics)} {short_text(record.proof, 600)}", drawn)


def _phase_section(record: RunRecord) -> Markup | None:
    totals = _sum_maps(record.metrics, "phases")
    if not totals:
        return _absent_section("Time per phase", "No phase was timed.")
    ranked = sorted(totals, key=lambda name: -totals[name])
    leading = ranked if len(ranked) <= _NUM_COLOURS + 1 else ranked[:_NUM_COLOURS]
    rest = ranked[len(leading) :]
    bars = []
    for group in bin_rows(record.metrics):
        sums = _sum_maps(group, "phases")
        means = [(f"f{i}", sums.get(name, 0.0) / len(group)) for i, name in enumerate(leading)]
        means += [("f6", sum(sums.get(name, 0.0) for name in rest) / len(group))] if rest else []
        lines = [
            f"{short_text(name, 40)}: {format_duration(sums[name] / len(group))}" for name in ranked if name in sums
        ]
        bars.append(Bar(*_group_ends(group), means, "\n".join([_describe_steps(group), *lines])))
    items: list[tuple[Shape, str, str]] = [
        ("square", f"k{i} f{i}", short_text(name, 24)) for i, name in enumerate(leading)
    ]
    items += [("square", "k6 f6", f"{len(rest)} others")] if rest else []
    drawn = step_bars(PlotFrame(height=300.0), bars, "seconds a step", items, "Seconds of each step by phase")
    total = sum(totals.values()) or 1.0
    rows = [
        [
            short_text(name, 80),
            format_duration(totals[name]),
            f"{totals[name] / len(record.metrics) * 1e3:.4g} ms",
            f"{100 * totals[name] / total:.1f} %",
        ]
        for name in ranked
    ]
    figures = make_table(["Phase", "Total", "A step", "Share"], rows, "figures")
    return make_section("Time per phase", f"The owner's process. {_describe_bins(record.metrics)}", drawn, figures)


def _cost_section(record: RunRecord) -> Markup | None:
    costs = cost_table(record)
    remark = "CPU seconds as each party claims them, up to its last applied step; the links hash and sign."
    return None if costs is None else make_section("Work of each party", remark, costs)


def _link_section(record: RunRecord) -> Markup | None:
    totals = _sum_maps(record.metrics, "bytes")
    if not totals:
        return _absent_section("Bytes per link", "No traffic was recorded.")
    ranked = sorted(totals.items(), key=lambda item: -item[1])
    claimed = {link for row in record.metrics for link in _list_texts(row.get("bytes_claimed"))}
    shown = [
        (short_text(name, 80).replace(">", " → ") + (_CLAIMED if name in claimed else ""), value)
        for name, value in ranked[:_MAX_LINKS]
    ]
    rest = ranked[_MAX_LINKS:]
    shown += [(f"{len(rest)} other links", sum(value for _, value in rest))] if rest else []
    num_steps = len(record.metrics)
    drawn = name_bars(
        shown, lambda value: f"{format_size(value)}, {format_size(value / num_steps)} a step", "Bytes per link"
    )
    remark = f"Sender → receiver, all {format_count(num_steps)} steps together."
    remark += " Claims are from their senders only; the owner sees its own links." if claimed else ""
    return make_section("Bytes per link", remark, drawn)


def _list_texts(value: Any) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _stage_section(record: RunRecord) -> Markup | None:
    stages = stage_table(record)
    return None if stages is None else make_section("Stages", "Roles at the beginning and at the end.", stages)


def _event_section(record: RunRecord) -> Markup | None:
    if not record.events:
        return None
    remark = "From the audit log, as written; phalanx audit verify checks its signatures and its chain."
    return make_section("Events", remark, event_timeline(record))


def _settings_section(record: RunRecord) -> Markup | None:
    facts = [(key, record.summary.get(key)) for key in ("config_digest", "final_weights_digest")]
    lines = [[key.replace("_", " "), make_element("code", {}, short_text(value, 80))] for key, value in facts if value]
    config_table = make_table(["", ""], lines) if lines else ""
    if not record.config_text:
        return make_section("Config", "", config_table) if lines else None
    text = make_element("pre", {}, record.config_text)
    return make_section(
        "Config",
        "",
        config_table,
        make_element("details", {}, make_element("summary", {}, "The resolved run file"), text),
    )


def _note_section(record: RunRecord) -> Markup | None:
    if not record.notes:
        return None
    items = [make_element("li", {}, short_text(note, 400)) for note in record.notes]
    return make_element("section", {"class": "notes"}, make_element("h2", {}, "Notes"), make_element("ul", {}, *items))


def _absent_section(title: str, remark: str) -> Markup:
    return make_element("section", {}, make_element("h2", {}, title), make_element("p", {"class": "quiet"}, remark))


def _sum_column(rows: list[Row], key: str) -> float:
    return sum(parse_number(row.get(key)) or 0.0 for row in rows)


def _sum_maps(rows: list[Row], key: str) -> dict[str, float]:
    totals: dict[str, float] = {}
    for row in rows:
        values = row.get(key)
        for name, value in values.items() if isinstance(values, dict) else ():
            totals[name] = totals.get(name, 0.0) + max(0.0, parse_number(value) or 0.0)
    return totals


def _group_ends(group: list[Row]) -> tuple[float, float]:
    steps = [float(row["step"]) for row in group]
    return min(steps), max(steps)


def _describe_steps(group: list[Row]) -> str:
    first, last = _group_ends(group)
    return f"step {format_amount(first, 12)}" if first == last else f"steps {first:.12g} to {last:.12g}, mean"


def _describe_bins(rows: list[Row]) -> str:
    groups = bin_rows(rows)
    return f"One bar is the mean of {len(groups[0])} steps." if len(groups[0]) > 1 else "One bar is one step."
