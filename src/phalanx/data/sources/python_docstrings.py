"""Docstrings of the standard library."""

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from phalanx.data.sources.files import SourceFile, fingerprint_files, read_bytes
from phalanx.data.sources.source import Document, SourceSettings
from phalanx.errors import DataError

# not the library itself, or files that are broken on purpose
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


class PythonDocstringsConfig(SourceSettings):
    """Docstrings of the standard library, read but never imported; one document per module."""

    kind: Literal["python_docstrings"] = "python_docstrings"


class PythonDocstrings:
    """One document per module: the dotted name and the docstring of all that has one, in source order.

    The files are parsed, never imported. Differs between Python versions.
    """

    def __init__(self, config: PythonDocstringsConfig, library: Path | None = None) -> None:
        self._kind = config.kind
        root = library or Path(sysconfig.get_paths()["stdlib"])
        named = ((path.relative_to(root), path) for path in root.rglob("*.py"))
        self._files = sorted(
            (SourceFile(name.as_posix(), path) for name, path in named if _LEFT_OUT.isdisjoint(name.parts)),
            key=lambda file: file.name,
        )
        if not self._files:
            raise DataError(f"{root}: has no .py files; this Python was installed without the sources of its library")

    def fingerprint(self) -> str:
        """Digest of names and contents of the modules."""
        return fingerprint_files(self._files, self._kind)

    def documents(self) -> Iterator[Document]:
        """Modules by path; one without docstrings gives an empty document."""
        for file in self._files:
            module = file.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            text = "\n\n".join(
                f"{name}\n{docstring}" for name, docstring in _collect_docstrings(_parse_module(file), module)
            )
            yield Document(f"docstrings of {module}", text)


def _parse_module(file: SourceFile) -> ast.Module:
    try:
        with warnings.catch_warnings():
            # an invalid escape in another author's module is not the user's business
            warnings.simplefilter("ignore")
            return ast.parse(read_bytes(Path(file.path)))
    except (SyntaxError, ValueError) as exc:
        raise DataError(f"{file.path}: cannot be parsed ({exc}); repair this Python installation") from exc


def _collect_docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        docstring = ast.get_docstring(node)
        if docstring:
            yield name, docstring
    # statements only: expressions are most of a tree and hold no docstring
    for part in ("body", "handlers", "orelse", "finalbody"):
        for child in getattr(node, part, ()):
            inner = f"{name}.{child.name}" if isinstance(child, _NAMED) else name
            if isinstance(child, _NESTING):
                yield from _collect_docstrings(child, inner)


_NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_NESTING = (*_NAMED, ast.If, ast.Try, ast.ExceptHandler, ast.With, ast.For, ast.While)
