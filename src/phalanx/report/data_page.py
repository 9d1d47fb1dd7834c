"""The page of a dataset: every byte of every source kept or dropped by a rule, and samples of the dropped rows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.config import printable_text
from phalanx.data.build.look import read_report
from phalanx.report.bars import part_bars
from phalanx.report.figures import format_amount, format_count, format_size, parse_number, short_text
from phalanx.report.shell import make_section, page_shell, write_page
from phalanx.report.svg import Markup, make_element
from phalanx.report.tables import make_table

PAGE = "report.html"
_MAX_SOURCES, _MAX_PARTS, _MAX_STEPS, _MAX_SAMPLES = 40, 6, 60, 5
_LONGEST = 600
Source = Mapping[str, Any]


def write_data_report(directory: Path) -> Path:
    """Write ``report.html`` into the directory of a dataset; return its path."""
    return write_page(directory / PAGE, render_data_report(read_report(directory), directory.name))


def render_data_report(report: Mapping[str, Any], name: str) -> str:
    """Return the whole page."""
    sources = [source for source in report["sources"] if isinstance(source, dict)][:_MAX_SOURCES]
    groups = [group for group in _as_list(report.get("groups")) if isinstance(group, dict)]
    parts = [
        _page_head(name, sources, groups),
        make_section("Every byte of every source", _ACCOUNT, _source_bars(sources), _account_table(sources)),
        make_section("Steps", "In the order in which each document met them.", _step_table(report, sources)),
        make_section(
            "Groups", "What a run mixes.", make_table(_GROUPS, [_group_cells(group) for group in groups], "figures")
        ),
        make_section(
            "Terms of use",
            "As the recipe states them.",
            make_table(_TERMS, [_term_cells(source) for source in sources]),
        ),
        make_section("Samples of dropped documents", _SAMPLED, *_sample_sections(sources)),
        make_section("Made with", "", make_table(("Library", "Version"), _version_rows(report), "figures")),
    ]
    return page_shell(f"Dataset {printable_text(name, 80)}", parts)


_ACCOUNT = (
    "Raw bytes of the input. The bytes of kept, dropped, quarantined and broken records add up exactly to those of "
    "the source; otherwise no dataset is made."
)
_SAMPLED = (
    "Chosen by their digests only. phalanx data inspect DIR --document NAME prints the fate of any document; "
    "[quarantine] release in the recipe admits a quarantined one."
)
_GROUPS = ("Group", "Split", "Documents", "Tokens")
_TERMS = ("Source", "Licence", "Consent", "Kind", "Files")


def _page_head(name: str, sources: Sequence[Source], groups: Sequence[Mapping[str, Any]]) -> Markup:
    raw = sum(_number_of(source.get("read"), "raw_bytes") + _broken_bytes(source) for source in sources)
    kept_bytes = sum(_number_of(source.get("kept"), "raw_bytes") for source in sources)
    waiting = sum(
        _number_of(fate, "documents") for source in sources for fate in _fates_of(source, "quarantined").values()
    )
    tiles = [
        ("Read", format_size(raw)),
        ("Kept", f"{format_size(kept_bytes)} ({100 * kept_bytes / raw if raw else 0:.1f} %)"),
        ("Documents", format_count(sum(_number_of(group, "documents") for group in groups))),
        ("Tokens", format_count(sum(_number_of(group, "tokens") for group in groups))),
        ("In quarantine", f"{format_count(waiting)} documents"),
    ]
    drawn = [
        make_element(
            "div",
            {"class": "tile"},
            make_element("div", {"class": "name"}, key),
            make_element("div", {"class": "value"}, value),
        )
        for key, value in tiles
    ]
    return make_element(
        "header",
        {},
        make_element("p", {"class": "run"}, "Dataset"),
        make_element("h1", {}, short_text(name, 80)),
        make_element("div", {"class": "tiles"}, *drawn),
    )


def _source_bars(sources: Sequence[Source]) -> Markup:
    """Draw a bar for each source, with the steps that left out most as its parts."""
    by_source = [_left_out(source) for source in sources]
    total: dict[str, float] = {}
    for parts in by_source:
        for name, value in parts.items():
            total[name] = total.get(name, 0.0) + value
    largest = sorted(total, key=lambda name: (-total[name], name))
    named = largest[: _MAX_PARTS - 1]
    rows = []
    for source, parts in zip(sources, by_source, strict=True):
        row = {"kept": _number_of(source.get("kept"), "raw_bytes"), **{name: parts.get(name, 0.0) for name in named}}
        if len(largest) > len(named):
            row["by other steps"] = sum(value for name, value in parts.items() if name not in named)
        rows.append((short_text(source.get("name"), 40), row))
    return part_bars(rows, format_size, "Raw bytes of each source, kept and left out by step")


def _left_out(source: Source) -> dict[str, float]:
    sizes = {step: _number_of(fate, "raw_bytes") for step, fate in _fates_of(source, "dropped").items()}
    for step, fate in _fates_of(source, "quarantined").items():
        sizes[f"{step} (quarantine)"] = _number_of(fate, "raw_bytes")
    sizes["broken"] = _broken_bytes(source)
    return {name: value for name, value in sizes.items() if value}


def _account_table(sources: Sequence[Source]) -> Markup:
    rows = []
    for source in sources:
        name = short_text(source.get("name"), 40)
        rows.append([name, "read", *_size_cells(source.get("read"))])
        rows.append(["", "kept", *_size_cells(source.get("kept"))])
        for fate in ("dropped", "quarantined", "broken"):
            for step, group in list(_fates_of(source, fate).items())[:_MAX_STEPS]:
                rows.append(["", f"{_HOW[fate]} {short_text(step, 40)}", *_size_cells(group)])
    return make_table(("Source", "What became of it", "Documents", "Raw bytes", "Bytes of text"), rows, "figures")


def _size_cells(value: Any) -> list[str]:
    return [format_count(_number_of(value, name)) for name in ("documents", "raw_bytes", "text_bytes")]


def _step_table(report: Mapping[str, Any], sources: Sequence[Source]) -> Markup:
    rows = []
    for step in _as_list(report.get("steps"))[:_MAX_STEPS]:
        name = short_text(step.get("name"), 40) if isinstance(step, dict) else ""
        if not name:
            continue
        totals = {
            fate: sum(_number_of(_fates_of(source, fate).get(name), "documents") for source in sources)
            for fate in _FATES
        }
        net = sum(_number_of(_fates_of(source, "edited").get(name), "net_bytes") for source in sources)
        rows.append(
            [
                name,
                short_text(step.get("settings"), 200),
                short_text(step.get("reference"), 120),
                *(format_count(totals[fate]) for fate in _FATES),
                f"{net:+.0f}" if net else "0",
            ]
        )
    heads = ("Step", "Settings", "Reference", "Dropped", "Quarantined", "Released", "Edited", "Bytes by edits")
    return make_table(heads, rows)


_HOW = {"dropped": "dropped by", "quarantined": "quarantined by", "broken": "broken:"}
_FATES = ("dropped", "quarantined", "released", "edited")


def _group_cells(one: Mapping[str, Any]) -> list[str]:
    return [
        short_text(one.get("group"), 40),
        short_text(one.get("split"), 40),
        format_count(one.get("documents")),
        format_count(one.get("tokens")),
    ]


def _term_cells(source: Source) -> list[str]:
    return [
        *(short_text(source.get(name), 200) for name in ("name", "licence", "consent", "kind")),
        format_count(source.get("files")),
    ]


def _version_rows(report: Mapping[str, Any]) -> list[list[str]]:
    versions = report.get("versions")
    return (
        [[short_text(name, 40), short_text(value, 40)] for name, value in sorted(versions.items())]
        if isinstance(versions, dict)
        else []
    )


def _sample_sections(sources: Sequence[Source]) -> list[Markup]:
    drawn = []
    for source in sources:
        for step, lines in list(_fates_of(source, "samples").items())[:_MAX_STEPS]:
            shown = [_sample_cells(sample) for sample in _as_list(lines)[:_MAX_SAMPLES] if isinstance(sample, dict)]
            title = f"{short_text(source.get('name'), 40)}: {short_text(step, 40)}"
            drawn.append(make_element("details", {}, make_element("summary", {}, title), *shown))
    return drawn or [make_element("p", {"class": "quiet"}, "Nothing was dropped.")]


def _sample_cells(line: Mapping[str, Any]) -> Markup:
    limit = f", limit {short_text(line.get('limit'), 60)}" if line.get("limit") not in ("", None) else ""
    value = line.get("value")
    shown = format_amount(value) if isinstance(value, float) else short_text(value, 200)
    reason = f"{short_text(line.get('fate'), 20)}: {short_text(line.get('measure'), 200)} {shown}{limit}"
    parts = [make_element("p", {"class": "remark"}, f"{short_text(line.get('document'), 200)}: {reason}")]
    if line.get("excerpt"):
        parts.append(make_element("pre", {}, short_text(line["excerpt"], _LONGEST)))
    return make_element("div", {}, *parts)


def _broken_bytes(source: Source) -> float:
    return sum(_number_of(fate, "raw_bytes") for fate in _fates_of(source, "broken").values())


def _number_of(value: Any, name: str) -> float:
    return (parse_number(value.get(name)) if isinstance(value, Mapping) else None) or 0.0


def _fates_of(source: Source, name: str) -> dict[str, Any]:
    fates = source.get(name)
    return fates if isinstance(fates, dict) else {}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
