"""Changes that a later ``phalanx join`` makes to the files of an earlier one in a directory; each change is printed."""

import itertools
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.files import read_file, write_text

if TYPE_CHECKING:
    from phalanx.security.invite import JoinToken

_RECORD = "joined.json"
Setting = str | int | bool | None


def has_joined(token: "JoinToken", home: Path, file: Path) -> bool:
    """Whether a directory was joined with this very token; False where it is new, or another token is for it.

    Args:
        file: Record, the last file that an earlier join wrote.

    Raises:
        ConfigError: The keys there are of another party, or of another authority than the token's.
    """
    from phalanx.errors import ConfigError
    from phalanx.security.crypto import certificate_fingerprint, load_identity, read_public

    if not file.exists():
        return False
    name = load_identity(home).name
    if name != token.name:
        raise ConfigError(
            f"{home}: holds the keys of {name!r}, but the token is for {token.name!r}; give another --dir"
        )
    authority = home / "authority.pem"
    if certificate_fingerprint(read_public(authority), str(authority)) != token.authority:
        raise ConfigError(
            f"{home}: holds keys that another authority certified, for the run of another owner; give another "
            "--dir for this token"
        ).with_facts(code="PHX-C019", file=str(home), key="--dir", do="give another --dir")
    record = home / _RECORD
    if not record.exists():
        # joined by a release that kept no record
        return True
    try:
        recorded = json.loads(read_file(record))
    except ValueError:
        return False
    return isinstance(recorded, dict) and recorded.get("token") == token.token_digest


def note_joined(token: "JoinToken", home: Path) -> None:
    """Note with which token a directory was joined; its secret is not kept."""
    write_text(home / _RECORD, json.dumps({"token": token.token_digest}) + "\n")


def change_file(path: Path, settings: Mapping[str, Setting]) -> list[str]:
    """Change keys of a TOML file, and leave everything else in it as it is.

    Args:
        settings: Setting per key, at most one table deep; None removes the key.
    """
    text = read_file(path).decode("utf-8", errors="replace")
    before, after = _parse_toml(path, text), _parse_toml(path, text)
    changed = []
    for key, value in settings.items():
        old_value = _find_key(before, key)
        if old_value == value:
            continue
        changed.append(f"{path}: {key} = {_format_value(value)} (was {_format_value(old_value)})")
        *tables, last = key.split(".")
        table = after
        for name in tables:
            table = table.setdefault(name, {})
        table.pop(last, None)
        if value is not None:
            table[last] = value
        text = _replace_key(text, key, value)
    if changed:
        write_text(path, text if _parses_to(text, after) else _format_toml(after))
    return changed


def _parse_toml(path: Path, text: str) -> dict[str, Any]:
    from phalanx.errors import ConfigError

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{path}: is not valid TOML: {exc}").with_facts(file=str(path)) from exc


def _find_key(data: Mapping[str, Any], key: str) -> Any:
    for name in key.split("."):
        data = data.get(name, {}) if isinstance(data, dict) else {}
    return None if data == {} else data


def _format_value(value: Any) -> str:
    return "left out" if value is None else json.dumps(value, ensure_ascii=False)


def _replace_key(text: str, key: str, value: Setting) -> str:
    """Replace, add or remove one line; the caller checks the result."""
    *tables, last = key.split(".")
    heads = [0, *(match.start() for match in re.finditer(r"^\[", text, re.MULTILINE)), len(text)]
    parts = [text[start:stop] for start, stop in itertools.pairwise(heads)]
    number = next((index for index, part in enumerate(parts) if tables and part.startswith(f"[{tables[0]}]")), 0)
    new_line = "" if value is None else f"{last} = {_format_value(value)}\n"
    old = re.compile(rf"^{re.escape(last)}\s*=.*\n?", re.MULTILINE)
    if old.search(parts[number]):
        parts[number] = old.sub(lambda found: new_line, parts[number], count=1)
    elif tables:
        parts[number] = parts[number].rstrip("\n") + f"\n{new_line}\n"
    else:
        parts[0] = new_line + parts[0]
    return "".join(parts)


def _parses_to(text: str, data: Mapping[str, Any]) -> bool:
    try:
        return tomllib.loads(text) == data
    except tomllib.TOMLDecodeError:
        return False


def _format_toml(data: Mapping[str, Any]) -> str:
    import tomli_w

    return tomli_w.dumps(data)
