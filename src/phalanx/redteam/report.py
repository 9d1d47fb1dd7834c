"""The report of an assessment: a table for a terminal, Markdown, and a page; whatever a model wrote is escaped."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.config import canonical_json, printable_text
from phalanx.errors import InputError, writing_cure
from phalanx.redteam.finding import AttackFinding, Score
from phalanx.redteam.garak import GarakRow
from phalanx.report.shell import make_section, page_shell, write_page
from phalanx.report.svg import make_element
from phalanx.report.tables import make_table

HEADS = ("attack", "outcome", "score", "interval", "chance", "n", "control", "measure")
_EXAMPLE = 300
_LIMITS = (
    "Attacks are the published ones that run on this machine; a stronger one may find more. An attack that was not "
    "judged is no pass. A control is the score of the same attack on a small model without any defence."
)


def finding_cells(finding: AttackFinding) -> list[str]:
    """Return one row of the table."""
    score = finding.score
    figures = (
        ["-"] * 4
        if score is None
        else [
            f"{score.value:.3f}",
            f"{score.interval[0]:.3f} to {score.interval[1]:.3f}",
            f"{score.chance:.3f}",
            str(score.n),
        ]
    )
    measure = printable_text(finding.why_not) if score is None else score.measure
    return [finding.attack, finding.outcome, *figures, _control_cell(finding.control), measure]


def _control_cell(control: Score | None) -> str:
    return "-" if control is None else f"{control.value:.3f}{'' if control.is_found else ' (failed)'}"


def render_findings(findings: Sequence[AttackFinding]) -> str:
    """Return the table as text for a terminal, with meanings and examples below it."""
    rows = [list(HEADS), *map(finding_cells, findings)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(HEADS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for finding in findings:
        if finding.outcome == "found":
            lines += ["", printable_text(f"{finding.attack}: {finding.meaning}", 1000)]
            lines += [f"  {printable_text(example, _EXAMPLE)}" for example in finding.examples]
    return "\n".join(lines)


def render_markdown(title: str, findings: Sequence[AttackFinding], rows: Sequence[GarakRow] = ()) -> str:
    """Return the report as Markdown; examples are in code spans that they cannot leave."""
    lines = [
        f"# Red team report: {_mark(title)}",
        "",
        _LIMITS,
        "",
        f"| {' | '.join(HEADS)} |",
        "|---" * len(HEADS) + "|",
    ]
    lines += [f"| {' | '.join(map(_mark, finding_cells(finding)))} |" for finding in findings]
    for finding in findings:
        if finding.score is not None:
            lines += ["", f"## {finding.attack}: {finding.outcome}", "", _mark(finding.meaning)]
            lines += [f"- `{_mark(example).replace('`', chr(39))[:_EXAMPLE]}`" for example in finding.examples]
    if rows:
        lines += ["", "## garak", "", f"| {' | '.join(GarakRow.HEADS)} |", "|---" * len(GarakRow.HEADS) + "|"]
        lines += [f"| {' | '.join(map(_mark, row.cells))} |" for row in rows]
    return "\n".join(lines) + "\n"


def _mark(text: str) -> str:
    plain = printable_text(text, 1000)
    return plain.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")


def write_report(
    out: Path, title: str, facts: Mapping[str, Any], findings: Sequence[AttackFinding], rows: Sequence[GarakRow] = ()
) -> Path:
    """Write ``redteam.json``, ``redteam.md`` and ``redteam.html``; return the path of the page.

    Args:
        facts: Contents of the JSON file.
    """
    sections = [make_section("Attacks", _LIMITS, make_table(HEADS, [finding_cells(finding) for finding in findings]))]
    for finding in findings:
        if finding.score is not None:
            shown = [make_element("p", {}, finding.meaning)]
            shown += [
                make_element("p", {}, make_element("code", {}, example[:_EXAMPLE])) for example in finding.examples
            ]
            sections.append(make_section(f"{finding.attack}: {finding.outcome}", "", *shown))
    if rows:
        sections.append(make_section("garak", "", make_table(GarakRow.HEADS, [row.cells for row in rows])))
    heading = make_element("h1", {}, f"Red team report: {title}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise InputError(f"{out}: cannot be made ({exc.strerror}); {writing_cure(exc)}") from exc
    write_page(out / "redteam.json", canonical_json(facts).decode())
    write_page(out / "redteam.md", render_markdown(title, findings, rows))
    return write_page(out / "redteam.html", page_shell(f"Red team: {title}", [heading, *sections]))
