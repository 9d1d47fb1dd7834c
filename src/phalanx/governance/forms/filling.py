"""Templates of forms, and the one renderer: each field has its source in the run, or is a blank for a person."""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from phalanx.config import StrictModel, printable_text
from phalanx.errors import ConfigError, InputError

_TEMPLATES = "templates"
_MARKS = re.compile(r"[\\`*_{}\[\]()#+!|~$<>&@:^=\"']|(?<=[A-Za-z])\.(?=[A-Za-z])")
_MAX_CHARACTERS, _MAX_ROWS = 2_000, 200
_Source = Annotated[str, Field(pattern=r"^[A-Za-z0-9_./-]+:[A-Za-z0-9_.-]+\z")]

Documents = Mapping[str, Any]
"""Facts of a run, by the file that has them."""


class FieldTemplate(StrictModel):
    """One question.

    Attributes:
        sources: Places of the answer in a run, as ``FILE:KEY``; the first that is there counts.
        ask: Question to a person, for a run that has none of the sources.
        columns: Columns of a table, where the value is a list of rows.
    """

    title: str
    sources: tuple[_Source, ...] = ()
    ask: str = ""
    columns: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.sources and not self.ask:
            raise ValueError(f"{self.title}: has neither sources nor ask")
        return self


class SectionTemplate(StrictModel):
    """Fields under one title.

    Attributes:
        when: The section is in the form of a run that has one of these; empty: of every run.
        threat: Beginning of a row of the threat model, of a risk.
    """

    title: str
    when: tuple[_Source, ...] = ()
    threat: str = ""
    fields: tuple[FieldTemplate, ...] = Field(min_length=1)


class FormTemplate(StrictModel):
    """One form."""

    title: str
    purpose: str
    sections: tuple[SectionTemplate, ...] = Field(min_length=1)


@dataclass(frozen=True)
class FilledValue:
    """One answer.

    Attributes:
        value: JSON data; None is a blank.
        source: File and key of the answer; None of a blank.
        ask: Question to a person; empty where the run answers.
    """

    title: str
    value: Any
    source: tuple[str, str] | None
    ask: str
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class FilledForm:
    """A form about one run.

    Attributes:
        sections: Title, row of the threat model, and answers.
    """

    name: str
    title: str
    purpose: str
    sections: tuple[tuple[str, str, tuple[FilledValue, ...]], ...]

    @property
    def values(self) -> list[FilledValue]:
        """All answers and blanks."""
        return [value for _, _, values in self.sections for value in values]

    def to_json(self) -> dict[str, Any]:
        """Return the form as JSON data."""
        return {
            "form": self.name,
            "title": self.title,
            "sections": [
                {
                    "title": title,
                    **({"threat": threat} if threat else {}),
                    "fields": [
                        {
                            "title": value.title,
                            "value": value.value,
                            "source": None
                            if value.source is None
                            else dict(zip(("file", "key"), value.source, strict=True)),
                            "to_be_answered_by_a_person": value.ask or None,
                        }
                        for value in values
                    ],
                }
                for title, threat, values in self.sections
            ],
        }


def form_names() -> list[str]:
    """Return the names of all forms."""
    files = resources.files(__package__).joinpath(_TEMPLATES).iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load_template(name: str) -> FormTemplate:
    """Read the template of a form.

    Raises:
        ConfigError: There is none of this name.
    """
    if name not in form_names():
        raise ConfigError(f"--form {printable_text(name, 50)}: expected one of {', '.join(form_names())}")
    text = resources.files(__package__).joinpath(_TEMPLATES, f"{name}.toml").read_text(encoding="utf-8")
    return FormTemplate.model_validate(tomllib.loads(text), strict=False)


def fill_form(name: str, documents: Documents) -> FilledForm:
    """Fill a form; what no document has is a blank, and never a guess."""
    template = load_template(name)
    sections = tuple(
        (section.title, section.threat, tuple(_fill_field(field, documents) for field in section.fields))
        for section in template.sections
        if not section.when or any(_find_value(source, documents) is not None for source in section.when)
    )
    return FilledForm(name, template.title, template.purpose, sections)


def _fill_field(field: FieldTemplate, documents: Documents) -> FilledValue:
    for source in field.sources:
        value = _find_value(source, documents)
        if value is not None:
            file, _, key = source.partition(":")
            return FilledValue(field.title, value, (file, key), "", field.columns)
    return FilledValue(field.title, None, None, field.ask or "the run does not tell; find out and fill in")


def _find_value(source: str, documents: Documents) -> Any:
    """Return what stands at a source; None where nothing does, or nothing is in it."""
    file, _, key = source.partition(":")
    value = documents.get(file)
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return None if value in ("", [], {}, ()) else value


def render_form(form: FilledForm) -> str:
    """Return a form as Markdown; no text of the run can leave its place or become a link, a heading or HTML."""
    lines = [f"# {form.title}", "", form.purpose, ""]
    for title, threat, values in form.sections:
        lines += [f"## {title}", ""]
        if threat:
            lines += [f"Threat model: *{_escape_text(threat)}*", ""]
        for value in values:
            lines += _render_value(value)
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _render_value(value: FilledValue) -> list[str]:
    if value.source is None:
        return [f"- **{value.title}**: ________ (to be answered by a person: {value.ask})"]
    origin = f" (source: `{value.source[0]}`, `{value.source[1]}`)"
    content = value.value
    if isinstance(content, list) and all(isinstance(row, Mapping) for row in content):
        columns = value.columns or tuple(sorted({name for row in content for name in row}))
        table = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
        table += [f"| {' | '.join(_show_value(row.get(name)) for name in columns)} |" for row in content[:_MAX_ROWS]]
        more = (
            [] if len(content) <= _MAX_ROWS else ["", f"{len(content) - _MAX_ROWS} further rows are in the JSON file."]
        )
        return [f"- **{value.title}**:{origin}", "", *table, *more, ""]
    if isinstance(content, Mapping):
        rows = [f"    - {_escape_text(str(name))}: {_show_value(content[name])}" for name in sorted(content)]
        return [f"- **{value.title}**:{origin}", *rows[:_MAX_ROWS]]
    return [f"- **{value.title}**: {_show_value(content)}{origin}"]


def _show_value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_show_value, value[:_MAX_ROWS])) or "none"
    if isinstance(value, Mapping):
        return _escape_text(json.dumps(value, sort_keys=True, ensure_ascii=True))
    return _escape_text(str(value))


def _escape_text(text: str) -> str:
    plain = printable_text(text, _MAX_CHARACTERS)
    return _MARKS.sub(lambda mark: {"<": "&lt;", ">": "&gt;", "&": "&amp;"}.get(mark[0], f"\\{mark[0]}"), plain)


def write_forms(documents: Documents, out: Path, names: Iterable[str] = ()) -> list[FilledForm]:
    """Write forms as Markdown and JSON; equal facts give equal bytes.

    Args:
        names: Forms to write; none: all.

    Raises:
        ConfigError: There is no such form, or a file of it exists.
        InputError: A file cannot be written.
    """
    forms = [fill_form(name, documents) for name in names or form_names()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        for form in forms:
            content = json.dumps(form.to_json(), indent=1, sort_keys=True, ensure_ascii=True, allow_nan=False)
            for suffix, text in ((".md", render_form(form)), (".json", content + "\n")):
                with (out / f"{form.name}{suffix}").open("x", encoding="utf-8") as file:
                    file.write(text)
    except FileExistsError as exc:
        raise ConfigError(f"{exc.filename}: exists; name a new directory") from exc
    except OSError as exc:
        raise InputError(f"{exc.filename or out}: cannot be written ({exc.strerror})") from exc
    return forms
