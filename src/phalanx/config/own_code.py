"""Code of the user's own behind a ``kind``: ``file.py:object`` or ``installed.module:object``, pinned by its digest.

A run file names the code, files are looked for in its directory only, and the executed bytes are those that were
hashed. A reference in a peer's message finds only code that this process has opened for itself.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.abc import SourceLoader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from phalanx.config.code_source import CodeReference, CodeSource, find_source, installed_roots, is_own, parse_reference
from phalanx.errors import ConfigError

OWN_KIND = "module:object"
"""What messages and tables call a kind that is no name of a table."""
CODE_KEYS = ("kind", "objective", "family")
"""Keys of a run file that may name code of the user's own."""
_PAGE = "docs/own_code.md has the interface and an example"
_SHOWN = 12

Found = TypeVar("Found")


def pin_own_code(data: Any, home: Path) -> None:
    """Write the digest of the source behind each reference of a run file that has none; nothing is run.

    Args:
        data: The run file as it was read; changed in place.
    """
    for section, key in _reference_places(data):
        section[key] = pin_reference(section[key], home)


def pin_reference(kind: str, home: Path) -> str:
    """Return a reference with the digest of its source; as it is, where it has one."""
    reference = parse_reference(kind)
    if reference.digest:
        return kind
    digest = find_source(reference, home).source_digest
    return str(CodeReference(reference.where, reference.name, digest))


def own_references(data: Any) -> list[str]:
    """Return every reference to code of the user's own in a config, as plain data."""
    return list(dict.fromkeys(section[key] for section, key in _reference_places(data)))


def changed_code(expected: list[str], found: list[str]) -> str | None:
    """Say which source has changed since it was pinned; None where none has."""
    now = {parse_reference(kind).bare_reference: parse_reference(kind).digest for kind in found}
    for kind in expected:
        before = parse_reference(kind)
        digest = now.get(before.bare_reference, before.digest)
        if digest != before.digest:
            return (
                f"{before.where} has changed: found SHA-256 {digest[:_SHOWN]}..., expected {before.digest[:_SHOWN]}..."
            )
    return None


def open_own_code(kind: str, home: Path) -> None:
    """Run the source of one reference, so that `resolve` finds its objects; a second call does nothing.

    Raises:
        ConfigError: The source is missing, is not the pinned one, fails, or imports what no digest covers.
    """
    reference = parse_reference(kind)
    key = (reference.name, reference.digest)
    if key in _OPENED:
        return
    if not reference.digest:
        raise ConfigError(f"{kind}: has no digest; read the run file with phalanx.load_run, which takes it")
    source = find_source(reference, home)
    digest = source.source_digest
    if digest != reference.digest:
        raise ConfigError(
            f"{source.path}: found SHA-256 {digest[:_SHOWN]}..., expected {reference.digest[:_SHOWN]}...; put the file "
            "back as it was, or take the digest out of the run file and begin a new run"
        )
    module = _run_source(reference, source)
    if not hasattr(module, reference.name):
        public = ", ".join(name for name in vars(module) if not name.startswith("_"))
        raise ConfigError(f"{source.path}: has no {reference.name!r}; it has {public[:300] or 'nothing'}")
    _OPENED[key] = _Opened(getattr(module, reference.name), source)


def code_key(kind: str) -> tuple[str, str]:
    """Return what two references to the same code have in common, wherever it lies: the object and the digest."""
    reference = parse_reference(kind)
    return reference.name, reference.digest


def resolve_kind(kind: str, table: Mapping[str, Found], own: Callable[[str, Any], Found]) -> Found:
    """Return what stands behind a kind: the line of a table, or code of the user's own.

    Args:
        kind: A name of the table, or a reference that this process has opened.
        own: Makes a table entry from a reference, or refuses it with `lacks`.
    """
    if kind in table:
        return table[kind]
    if not is_own(kind):
        raise ConfigError(f"found {kind!r}; expected one of {', '.join(table)}, or {OWN_KIND}")
    reference = parse_reference(kind)
    opened = _OPENED.get((reference.name, reference.digest))
    if opened is None:
        raise ConfigError(
            f"{reference.bare_reference}: is code that this process has not loaded from a file of its own; name it "
            f"there with the digest {reference.digest}"
        )
    return own(reference.bare_reference, opened.loaded_object)


def check_methods(kind: str, implementation: Any, what: str, methods: tuple[str, ...]) -> None:
    """Return where an object has every method of an interface."""
    missing = [name for name in methods if not callable(getattr(implementation, name, None))]
    if missing:
        raise unfit_code_error(
            kind, f"a {type(implementation).__name__} without {' and '.join(f'{name}()' for name in missing)}", what
        )


def unfit_code_error(kind: str, found: str, expected: str) -> ConfigError:
    """Say that an object is not what its place asks for."""
    return ConfigError(f"{kind}: found {found}; expected {expected}; {_PAGE}")


def source_files(kinds: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield digest and bytes of each file, not of an installed module, that these references have opened."""
    for kind in kinds:
        reference = parse_reference(kind)
        opened = _OPENED.get((reference.name, reference.digest))
        if opened is not None and reference.is_file:
            yield reference.digest, opened.source.hashed


def users_traceback(error: BaseException) -> str:
    """Return the traceback of an error from the first line of code that is the user's own, without our frames."""
    summary = traceback.TracebackException.from_exception(error, compact=True)
    own_files = {str(opened.source.path) for opened in _OPENED.values()} | _RUNNING
    frames = list(summary.stack)
    first = next((index for index, frame in enumerate(frames) if frame.filename in own_files), len(frames))
    summary.stack = traceback.StackSummary.from_list(frames[first:])
    summary.__cause__ = summary.__context__ = None
    return "".join(summary.format()).rstrip()


@dataclass(frozen=True)
class _Opened:
    """One object, and the source that made it."""

    loaded_object: Any
    source: CodeSource


_OPENED: dict[tuple[str, str], _Opened] = {}
"""What this process has run, by the object's name and the digest of its source: no place has two meanings."""
_RUNNING: set[str] = set()


class _BytesLoader(SourceLoader):
    """A loader that runs the bytes that were hashed, and writes nothing beside them."""

    def __init__(self, source: CodeSource) -> None:
        self._source = source

    def get_filename(self, fullname: str) -> str:
        """The path that tracebacks show."""
        del fullname
        return str(self._source.path)

    def get_data(self, path: str | bytes) -> bytes:
        """The bytes in hand; the file may have changed since."""
        del path
        return self._source.hashed


def _reference_places(data: Any) -> Iterator[tuple[dict[str, Any], str]]:
    if isinstance(data, dict):
        for key, value in data.items():
            if key in CODE_KEYS and is_own(value):
                yield data, key
            elif key != "options":
                yield from _reference_places(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _reference_places(value)


def _run_source(reference: CodeReference, source: CodeSource) -> ModuleType:
    _RUNNING.add(str(source.path))
    try:
        module = _run_file(reference, source) if reference.is_file else importlib.import_module(reference.where)
    except ConfigError:
        raise
    except (Exception, SystemExit) as exc:
        # whatever the user's code raises
        raise ConfigError(f"{source.path}: cannot be loaded:\n{users_traceback(exc)}") from exc
    finally:
        _RUNNING.discard(str(source.path))
    return module


def _run_file(reference: CodeReference, source: CodeSource) -> ModuleType:
    name, before = f"phalanx_own_{reference.digest}", set(sys.modules)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.machinery.ModuleSpec(name, _BytesLoader(source), origin=str(source.path))
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(source.path)
    # a dataclass looks its module up
    sys.modules[name] = module
    try:
        _BytesLoader(source).exec_module(module)
        _check_imports(source.path, before)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _check_imports(path: Path, before: set[str]) -> None:
    """Refuse a file that has imported another one that is not installed: no digest would cover it."""
    roots = [*installed_roots(), *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))]
    for name in sorted(set(sys.modules) - before):
        origin = getattr(getattr(sys.modules[name], "__spec__", None), "origin", None)
        is_ours = name.partition(".")[0] == "phalanx" or name.startswith("phalanx_own_")
        if is_ours or not isinstance(origin, str) or not origin.endswith(".py"):
            continue
        if not any(Path(origin).resolve().is_relative_to(root) for root in roots):
            raise ConfigError(
                f"{path}: imports {origin}, which no digest covers; put everything into one file, or install a package"
            )
