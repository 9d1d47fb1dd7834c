"""Sources of text; to add one: one file with its config, one line of the table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.config import any_kind, printable_text, resolve_kind
from phalanx.data.sources.canaries import (
    CanaryConfig as CanaryConfig,
    CanaryDocuments,
    CanarySettings as CanarySettings,
    candidate_canaries as candidate_canaries,
    planted_canaries as planted_canaries,
)
from phalanx.data.sources.dialogue import DialogueConfig as DialogueConfig, DialogueFiles
from phalanx.data.sources.epub import EpubConfig as EpubConfig, EpubFiles
from phalanx.data.sources.html import HtmlConfig as HtmlConfig, HtmlFiles
from phalanx.data.sources.jsonl import JsonlConfig as JsonlConfig, JsonlFiles
from phalanx.data.sources.listing import is_empty, list_all
from phalanx.data.sources.mail import MailConfig as MailConfig, MailFiles
from phalanx.data.sources.own import OwnSource, OwnSourceConfig as OwnSourceConfig
from phalanx.data.sources.parquet import ParquetConfig as ParquetConfig, ParquetFiles
from phalanx.data.sources.python_docstrings import PythonDocstrings, PythonDocstringsConfig as PythonDocstringsConfig
from phalanx.data.sources.python_manual import PythonManual, PythonManualConfig as PythonManualConfig
from phalanx.data.sources.source import (
    BrokenRecord as BrokenRecord,
    Document as Document,
    FileSource as FileSource,
    Origin as Origin,
    Source as Source,
    SourceSettings as SourceSettings,
)
from phalanx.data.sources.source_code import CodeConfig as CodeConfig, CodeFiles
from phalanx.data.sources.tables import CsvConfig as CsvConfig, CsvFiles
from phalanx.data.sources.text import TextConfig as TextConfig, TextFiles
from phalanx.data.sources.warc import WarcConfig as WarcConfig, WarcFiles
from phalanx.errors import DataError


@dataclass(frozen=True)
class SourceEntry:
    """One line of the table."""

    config: type[SourceSettings]
    open: Callable[[Any], Source]


SOURCES: dict[str, SourceEntry] = {
    "python_manual": SourceEntry(PythonManualConfig, PythonManual),
    "python_docstrings": SourceEntry(PythonDocstringsConfig, PythonDocstrings),
    "text": SourceEntry(TextConfig, TextFiles),
    "jsonl": SourceEntry(JsonlConfig, JsonlFiles),
    "html": SourceEntry(HtmlConfig, HtmlFiles),
    "warc": SourceEntry(WarcConfig, WarcFiles),
    "parquet": SourceEntry(ParquetConfig, ParquetFiles),
    "csv": SourceEntry(CsvConfig, CsvFiles),
    "dialogue": SourceEntry(DialogueConfig, DialogueFiles),
    "mail": SourceEntry(MailConfig, MailFiles),
    "epub": SourceEntry(EpubConfig, EpubFiles),
    "code": SourceEntry(CodeConfig, CodeFiles),
    "canaries": SourceEntry(CanaryConfig, CanaryDocuments),
}


def source_union(sources: Mapping[str, SourceEntry]) -> Any:
    """Return the type of a run file's section for one of these sources, or the user's own, by ``kind``."""
    return any_kind({name: entry.config for name, entry in sources.items()}, OwnSourceConfig)


if TYPE_CHECKING:
    SourceConfig = SourceSettings
else:
    # at run time the table alone says which there are
    SourceConfig = source_union(SOURCES)


def open_source(config: SourceConfig) -> Source:
    """Find the source's files; no text is read yet."""
    return resolve_kind(config.kind, SOURCES, _own_entry).open(config)


def _own_entry(kind: str, implementation: Any) -> SourceEntry:
    return SourceEntry(OwnSourceConfig, lambda config: OwnSource(kind, implementation, config))


def links_out_of(sources: Sequence[SourceSettings], key: str) -> list[str]:
    """Return a warning for each source with links to text beside its folder, which is read."""
    warnings = []
    for number, source in enumerate(sources):
        path = getattr(source, "path", None)
        if not isinstance(path, Path) or path.is_absolute() or not path.is_dir():
            continue
        try:
            is_text = source.kind in SOURCES
            files = getattr(open_source(source), "files", ()) if is_text else list_all(path, (".jsonl",))
        except DataError:
            # whoever reads the source says why
            continue
        files = [file for file in files if file.linked_to]
        if files:
            shown = ", ".join(printable_text(f"{file.name} -> {file.linked_to}") for file in files[:_SHOWN_LINKS])
            more = f" and {len(files) - _SHOWN_LINKS} more" if len(files) > _SHOWN_LINKS else ""
            warnings.append(
                f"WARNING: {key}.{number}: {len(files)} files are read that lie outside {printable_text(str(path))}, "
                f"because links in it lead to them: {shown}{more}; delete the links if you did not make them"
            )
    return warnings


_SHOWN_LINKS = 5


def no_text(config: SourceSettings) -> DataError:
    """Say that a source has nothing to learn from."""
    do, location = "remove it or give it another path", getattr(config, "path", None)
    if location is None:
        return DataError(f"kind {config.kind!r}: holds no text; {do}").with_facts(
            code="PHX-I012", key="data.sources", do=do
        )
    state = "is empty" if is_empty(location) else "holds no text"
    return DataError(f"{location}: {state}; {do}").with_facts(
        code="PHX-I012", file=str(location), key="data.sources", found=state, expected="text", do=do
    )
