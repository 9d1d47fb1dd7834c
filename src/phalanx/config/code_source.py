"""The source behind a reference to code of the user's own: where it is looked for, and what its digest covers."""

import hashlib
import importlib.machinery
import importlib.util
import re
import site
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import ConfigError

KEPT_CODE = "code"
"""The folder of a run directory that keeps each file under its digest."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_BYTES = 1 << 22


@dataclass(frozen=True)
class CodeReference:
    """A kind that is code of the user's own, taken apart.

    Attributes:
        where: A file ending in ``.py``, or the dotted name of an installed module.
        digest: SHA-256 in hex of its source; empty where it is not pinned yet.
    """

    where: str
    name: str
    digest: str = ""

    @property
    def is_file(self) -> bool:
        """Whether it is a file, and no installed module."""
        return self.where.endswith(".py")

    @property
    def bare_reference(self) -> str:
        """The reference as a run file has it, without its digest."""
        return f"{self.where}:{self.name}"

    def __str__(self) -> str:
        return f"{self.bare_reference}@{self.digest}" if self.digest else self.bare_reference


def is_own(kind: object) -> bool:
    """Whether a kind is meant as code of the user's own; no name of a table has a colon."""
    return isinstance(kind, str) and ":" in kind


def parse_reference(kind: str) -> CodeReference:
    """Take a kind apart."""
    source, _, rest = kind.rpartition(":")
    name, separator, digest = rest.partition("@")
    reference = CodeReference(source, name, digest)
    if not name.isidentifier():
        raise ConfigError(
            f"{kind}: found {name!r} behind the colon; expected one name such as Chats, without dots or spaces"
        )
    if separator and not _DIGEST.fullmatch(digest):
        raise ConfigError(f"{kind}: found {digest[:80]!r} behind the @; expected 64 digits of SHA-256, or nothing")
    path = Path(source)
    if reference.is_file and (path.is_absolute() or ".." in path.parts):
        raise ConfigError(f"{kind}: expected a file in the run file's directory or below it; copy it there")
    if not reference.is_file and not all(part.isidentifier() for part in source.split(".")):
        raise ConfigError(
            f"{kind}: found {source!r} before the colon; expected a file that ends in .py, or an installed module"
        )
    return reference


@dataclass(frozen=True)
class CodeSource:
    """The source of one reference.

    Attributes:
        path: The file, or the first file of an installed package.
        hashed: The bytes that its digest covers: of one file, or of every file of the package.
    """

    path: Path
    hashed: bytes

    @property
    def source_digest(self) -> str:
        """SHA-256 in hex."""
        return hashlib.sha256(self.hashed).hexdigest()


def find_source(reference: CodeReference, home: Path) -> CodeSource:
    """Find the source of a reference; nothing of it is run."""
    return _file_source(reference, home) if reference.is_file else _module_source(reference)


def _file_source(reference: CodeReference, home: Path) -> CodeSource:
    path, home = home / reference.where, home.resolve()
    pinned_copy = home / KEPT_CODE / f"{reference.digest}.py"
    if reference.digest and not path.exists() and pinned_copy.exists():
        # the resolved run file of a run directory, where the digest names the file
        path = pinned_copy
    if not path.resolve().is_relative_to(home):
        raise ConfigError(f"{path}: leads to {path.resolve()}, outside {home}; copy the file to where the run file is")
    try:
        if not path.is_file():
            raise ConfigError(
                f"{path}: not found; {reference.bare_reference} is looked for in the directory of the run file"
            )
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read ({exc.strerror}); check the file and its permissions") from exc
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{path}: is longer than {_MAX_BYTES} bytes; expected a file of source code")
    return CodeSource(path.resolve(), content)


def _module_source(reference: CodeReference) -> CodeSource:
    """Find the files of an installed package without running any; what lies in the working directory is none."""
    top, *below = reference.where.split(".")
    spec = importlib.machinery.PathFinder.find_spec(top, [str(root) for root in installed_roots()])
    origin = None if spec is None else spec.origin
    if spec is None or origin is None or not origin.endswith(".py"):
        raise ConfigError(
            f"{reference.bare_reference}: no installed package has a module {top!r}; install it, or name a file in "
            f"the run file's directory: {top}.py:{reference.name}"
        )
    first = importlib.util.find_spec(top) if top not in sys.modules else sys.modules[top].__spec__
    if first is None or first.origin is None or Path(first.origin).resolve() != Path(origin).resolve():
        raise ConfigError(
            f"{reference.bare_reference}: {None if first is None else first.origin} would be imported in the place "
            f"of the installed {origin}; start from another directory, or rename the file"
        )
    folders = spec.submodule_search_locations
    for part in below:
        inner = importlib.machinery.PathFinder.find_spec(part, folders) if folders else None
        if inner is None:
            raise ConfigError(f"{reference.bare_reference}: the installed package {origin} has no module {part!r}")
        folders = inner.submodule_search_locations
    path = Path(origin)
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    parts = [(file.relative_to(path.parent).as_posix().encode(), file.read_bytes()) for file in files]
    return CodeSource(path, b"".join(b"%d:%s%d:%s" % (len(n), n, len(text), text) for n, text in parts))


def installed_roots() -> list[Path]:
    """Return the folders of installed packages, and those that a ``.pth`` file there adds (`pip install -e`)."""
    paths = [*site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("purelib", "platlib"))]
    roots = dict.fromkeys(Path(path).resolve() for path in paths)
    for root in list(roots):
        for added in sorted(root.glob("*.pth")):
            lines = added.read_text(encoding="utf-8", errors="replace").splitlines()
            path_rows = (row for row in lines if row.strip() and not row.startswith(("#", "import ", "import\t")))
            roots |= dict.fromkeys((root / row.strip()).resolve() for row in path_rows)
    return list(roots)
