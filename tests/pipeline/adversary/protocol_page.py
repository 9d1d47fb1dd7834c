"""The tables of docs/protocol.md, which the adversary and the schema tests read."""

from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "protocol.md"


def table(title: str) -> list[dict[str, str]]:
    """Return the rows of the first table under a heading, each by the names of its columns."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    names = [name.strip() for name in rows[0]]
    return [dict(zip(names, (cell.strip() for cell in row), strict=True)) for row in rows[2:]]


def words(cell: str) -> tuple[str, ...]:
    """The words of a cell that lists some."""
    return tuple(word.strip().strip("`") for word in cell.split(",") if word.strip())


MESSAGES = {row["kind"].strip("`"): row for row in table("Messages")}
"""Rows of the table of messages, by kind."""

SAYERS = {kind: "owner" if row["from"] == "owner" else "worker" for kind, row in MESSAGES.items()}
"""Whether the owner or a worker sends a kind."""

LISTENERS = {kind: "owner" if row["to"] == "owner" else "worker" for kind, row in MESSAGES.items()}
"""Whether the owner or a worker gets a kind."""

IDENTITY = {kind: words(row["identity"]) for kind, row in MESSAGES.items()}
"""The fields of a kind that tell which statement it is."""

CONTENT = {kind: words(row["content"]) for kind, row in MESSAGES.items()}
"""The fields of a kind that are said."""
