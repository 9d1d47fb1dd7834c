"""Files below a folder: which are read, and why each other one is passed over. One rule for every source.

A link never leads out of the folder that the user named, except into folders that the user names beside it, and to the
text of the project that the folder is part of: the maker of a corpus could otherwise have `~/.ssh/id_rsa` read as text
([ADR 212]).
"""

import errno
import os
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.config import printable_text
from phalanx.data.sources.files import PACKED, SkipReason, SourceFile, list_objects, unreadable_error
from phalanx.errors import DataError

_LEFT_BY_SYSTEMS = frozenset(
    {
        *("__macosx", "icon\r", "thumbs.db", "desktop.ini", "ehthumbs.db", "$recycle.bin"),
        *("system volume information", "lost+found", "@eadir", "__pycache__"),
    }
)
_LEFT_BY_EDITORS = ("~", ".swp", ".swo", ".bak", ".orig", ".tmp", ".part", ".crdownload")
_SHOWN = 200
_MAX_COUNTED = 1_000_000
"""Files below a folder that is passed over: more are not counted."""

OF_ANOTHER_KIND = "is of no kind that this source reads"
_OUT = (
    "is a link out of the folder of this source, which is not followed; replace it by a copy, or add its target "
    "folder to linked_roots"
)


@dataclass(frozen=True)
class _Place:
    """A file, folder or link that was met on the way."""

    name: str
    path: Path


def leftover_reason(name: str) -> str | None:
    """Return why a file or folder of this name is a leftover; None where it may be text."""
    lower = name.lower()
    if lower.startswith("._"):
        return "is what macOS leaves beside a file"
    if lower.startswith("."):
        return "is hidden"
    if lower in _LEFT_BY_SYSTEMS:
        return "is what a system leaves in folders"
    if lower.startswith("~$") or (lower.startswith("#") and lower.endswith("#")) or lower.endswith(_LEFT_BY_EDITORS):
        return "is what an editor or a download leaves behind"
    return None


def list_all(location: Path | str, suffixes: tuple[str, ...], linked_roots: Sequence[Path] = ()) -> list[SourceFile]:
    """List a single file, or every file below a folder, sorted by name; skipped ones with the reason.

    Args:
        location: A file (any suffix) or a folder; here, or in an object store.
        suffixes: Suffixes of files that are read, for example ``(".txt",)``; ``.txt.gz`` and ``.txt.zst`` are then
            meant too.
        linked_roots: Folders beside `location` that links below it may lead into.
    """
    files = _list_location(location, endings := _with_packed(suffixes), linked_roots)
    if all(file.passed_over for file in files):
        faults = [
            (file.name, file.passed_over.reason) for file in files if file.passed_over and file.passed_over.is_fault
        ]
        more = f"; {faults[0][0][:_SHOWN]} {faults[0][1]}" if faults else ""
        raise DataError(
            f"{location}: no file of this source's kind found; expected {', '.join(endings)}{printable_text(more)}"
        ).with_facts(
            code="PHX-I011",
            file=str(location),
            found="no such file",
            expected=", ".join(endings),
            do="give a path with such files, or another kind of source",
        )
    return files


def list_files(location: Path | str, suffixes: tuple[str, ...]) -> list[SourceFile]:
    """List the files that a source of these suffixes reads, sorted by name; none where there are none."""
    return [file for file in _list_location(location, _with_packed(suffixes)) if file.passed_over is None]


def is_empty(location: Path | str) -> bool:
    """Return whether a file of this machine, or every file below a folder, has no bytes."""
    if not isinstance(location, Path):
        return False
    sizes = [file.path.stat().st_size for file in list_files(location, ("",)) if isinstance(file.path, Path)]
    return not any(sizes)


def _with_packed(suffixes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{suffix}{packed}" for suffix in suffixes for packed in ("", *PACKED))


def _list_location(
    location: Path | str, wanted: tuple[str, ...], linked_roots: Sequence[Path] = ()
) -> list[SourceFile]:
    files: list[SourceFile] | None
    if isinstance(location, str):
        files = _list_store(location, wanted)
    elif location.is_file():
        files = [SourceFile(name_as_text(location.name), location)]
    else:
        files = FolderListing(location, wanted, linked_roots).files if location.is_dir() else None
    if files is None:
        begins = (
            "" if isinstance(location, str) or location.is_absolute() else f"; relative paths start at {Path.cwd()}"
        )
        raise DataError(f"{location}: not found; give the path of a file or a directory{begins}").with_facts(
            code="PHX-I011",
            file=str(location),
            found="nothing",
            expected="a file or a directory",
            do="give the path of a file or a directory",
        )
    return sorted(files, key=lambda file: file.name)


def _project_of(location: Path, root: Path) -> Path | None:
    """Return the folder that phalanx was started in, where the source is named relative to it and lies in it.

    A home directory and the root of the file system are no project: too much lies there that is no part of one.
    """
    project = Path.cwd().resolve()
    homes = {Path(os.path.expanduser("~")).resolve(), Path(project.anchor)}
    return None if location.is_absolute() or project in homes or not root.is_relative_to(project) else project


class FolderListing:
    """One walk below a folder.

    Args:
        root: The folder; where it is a link itself, its target.
        linked_roots: Further folders that links may lead into.
    """

    def __init__(self, root: Path, wanted: tuple[str, ...], linked_roots: Sequence[Path] = ()) -> None:
        self.files: list[SourceFile] = []
        self._suffixes = wanted
        self._roots = [_resolve_path(folder) for folder in (root, *linked_roots)]
        self._project = _project_of(root, self._roots[0])
        self._visited: dict[Path, str] = {}
        self._links: deque[_Place] = deque()
        self._walk_folder(_Place("", self._roots[0]))
        # what lies in the folder itself is read under its own name, and never under that of a link to it
        while self._links:
            self._follow_link(self._links.popleft())

    def _walk_folder(self, folder: _Place) -> None:
        waiting = [folder]
        while waiting:
            place = waiting.pop()
            self._visited[place.path] = place.name
            for inner in _list_children(place):
                kind = inner.path.lstat().st_mode
                name = inner.path.name
                if stat.S_ISLNK(kind):
                    self._links.append(inner)
                elif (reason := leftover_reason(name)) is not None:
                    self._record_skipped(inner, reason)
                elif stat.S_ISDIR(kind):
                    waiting.append(inner)
                elif stat.S_ISREG(kind):
                    self._take_file(inner)
                else:
                    self._record_skipped(inner, "is no file, but a pipe, socket or device")

    def _take_file(self, place: _Place) -> None:
        if self._is_wanted(place):
            if place.path in self._visited:
                first_name = self._visited[place.path][:_SHOWN]
                self._record_skipped(place, f"is the same file as {first_name}, which is read under that name")
                return
            self._visited[place.path] = place.name
            self.files.append(SourceFile(place.name, place.path, linked_to=self._name_in_project(place.path)))
        else:
            self._record_skipped(place, OF_ANOTHER_KIND)

    def _is_wanted(self, place: _Place) -> bool:
        return place.name.lower().endswith(self._suffixes)

    def _follow_link(self, link: _Place) -> None:
        if (reason := leftover_reason(link.path.name)) is not None:
            self._record_skipped(link, reason)
            return
        try:
            target = link.path.resolve(strict=True)
        except (OSError, RuntimeError) as exc:
            # RuntimeError: a circle of links, before Python 3.13
            is_circle = isinstance(exc, RuntimeError) or exc.errno == errno.ELOOP
            self._record_skipped(
                link, "is a link to itself" if is_circle else "is a link to nothing", is_fault=self._is_wanted(link)
            )
            return
        place = _Place(link.name, target)
        if not (self._is_inside(target) or self._is_of_project(target)):
            self._record_skipped(link, _OUT, is_fault=target.is_dir() or self._is_wanted(link))
        elif target in self._visited:
            first_name = self._visited[target] or "the folder itself"
            self._record_skipped(link, f"is a link to {first_name[:_SHOWN]}, which is read under that name")
        elif target.is_dir():
            self._walk_folder(place)
        elif target.is_file():
            self._take_file(place)
        else:
            self._record_skipped(link, "is a link to a pipe, socket or device")

    def _is_inside(self, target: Path) -> bool:
        return any(target.is_relative_to(root) for root in self._roots)

    def _is_of_project(self, target: Path) -> bool:
        """Whether a link out of the folder leads to text of the project that the folder is part of.

        The target's real name decides, so that ``b.txt -> keys/owner.key`` is none, and nothing hidden is.
        """
        project = self._project
        if project is None or not target.is_relative_to(project) or self._roots[0].is_relative_to(target):
            return False
        if any(leftover_reason(part) is not None for part in target.relative_to(project).parts):
            return False
        return target.is_dir() or target.name.lower().endswith(self._suffixes)

    def _name_in_project(self, path: Path) -> str:
        if self._project is None or self._is_inside(path):
            return ""
        return name_as_text(str(path.relative_to(self._project)))

    def _record_skipped(self, place: _Place, reason: str, *, is_fault: bool = False) -> None:
        count, size = _size_below(place.path)
        is_folder = place.path.is_dir() and not place.path.is_symlink()
        more = f" ({count} files)" if is_folder else ""
        name = f"{place.name}/" if is_folder else place.name
        self.files.append(SourceFile(name, place.path, passed_over=SkipReason(f"{reason}{more}", size, is_fault)))


def _list_store(address: str, wanted: tuple[str, ...]) -> list[SourceFile] | None:
    objects = list_objects(address)
    if objects is None or isinstance(objects, SourceFile):
        return None if objects is None else [objects]
    files = []
    for file, size in objects:
        reason = next((why for part in file.name.split("/") if (why := leftover_reason(part)) is not None), None)
        if reason is None and not file.name.lower().endswith(wanted):
            reason = OF_ANOTHER_KIND
        files.append(file if reason is None else replace(file, passed_over=SkipReason(reason, size)))
    return files


def _list_children(place: _Place) -> Iterator[_Place]:
    try:
        with os.scandir(place.path) as entries:
            names = sorted(entry.name for entry in entries)
    except OSError as exc:
        raise unreadable_error(place.path, exc) from exc
    for name in names:
        plain = name_as_text(name)
        yield _Place(f"{place.name}/{plain}" if place.name else plain, place.path / name)


def name_as_text(name: str) -> str:
    """Return a file's name as text that can be written: bytes that are no UTF-8 as their codes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _resolve_path(path: Path) -> Path:
    try:
        return path.resolve(strict=True)
    except (OSError, RuntimeError) as exc:
        raise unreadable_error(path, exc) from exc


def _size_below(path: Path) -> tuple[int, int]:
    """Return files and bytes below a path, no link followed; a link has no bytes of its own."""
    if path.is_symlink():
        return 1, 0
    if not path.is_dir():
        return 1, path.lstat().st_size
    count = size = 0
    for folder, _, names in os.walk(path):
        for name in names:
            count += 1
            size += os.lstat(os.path.join(folder, name)).st_size
            if count >= _MAX_COUNTED:
                return count, size
    return count, size
