"""CPython's library: the package that a function's source is from. The interpreter's own files; none is run."""

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from phalanx.data.tasks.split import balance_classes
from phalanx.data.tasks.task import Example, LabelledExamples, TaskCard, unique_examples
from phalanx.errors import DataError

_PER_PACKAGE = 250
_SEED = 0
CLASSES = ("asyncio", "email", "importlib", "logging", "multiprocessing", "unittest", "urllib", "xml")


def load_python_functions(home: Path | None = None) -> LabelledExamples:
    """Read at most 250 functions of each of eight packages, without their docstrings.

    Args:
        home: Folder that may have another release's packages; else this interpreter's are read.
    """
    folder = home if home is not None and (home / CLASSES[0]).is_dir() else Path(sysconfig.get_path("stdlib"))
    chosen = unique_examples(CLASSES, _read_functions(folder), str(folder))
    return LabelledExamples(chosen.classes, balance_classes(chosen.examples, _PER_PACKAGE, _SEED), chosen.contradictory)


def _read_functions(folder: Path) -> Iterator[Example]:
    for label, name in enumerate(CLASSES):
        for path in sorted((folder / name).rglob("*.py")):
            # one release keeps tests of a package inside it, another one elsewhere
            if "test" in path.relative_to(folder).parts:
                continue
            try:
                tree = ast.parse(path.read_bytes())
            except (OSError, SyntaxError, ValueError) as exc:
                raise DataError(f"{path}: cannot be read as Python ({exc}); give the library of one release") from exc
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield Example(_write_function(node), label)


def _write_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if ast.get_docstring(node, clean=False) is not None:
        node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(node)


PYTHON_FUNCTIONS = TaskCard(
    name="python_functions",
    question="which of eight packages of Python's library a function is from",
    source="CPython's library, Python Software Foundation, as installed with the interpreter",
    licence="PSF-2.0",
    load=load_python_functions,
)
