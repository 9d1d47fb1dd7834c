"""The rules of the house that no linter knows: sizes, forbidden calls, the tree of exceptions."""

import ast
import importlib
import inspect
import re
import shutil
import socket
import subprocess
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from phalanx import errors

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "phalanx"
FILES = sorted(SOURCE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BESIDE = sorted(path for folder in ("benchmarks", "examples", "scripts") for path in (ROOT / folder).rglob("*.py"))
MAX_COLLABORATORS = 6
RUN_CODE_FROM_BYTES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
RUN_CODE_CALLS = {("torch", "load"), ("torch", "save"), ("multiprocessing", "Queue"), ("mp", "Queue")}
RUN_CODE_OPTIONS = {"allow_pickle", "trust_remote_code"}
RED_TEAM = {"lab", "testing"}
ABOVE_RED_TEAM = {"cli"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def pytest_ids(paths: list[Path]) -> list[str]:
    return [name_of(path) for path in paths]


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return {name_of(path): path.read_text(encoding="utf-8") for path in FILES}


def crowded_constructors(source: str) -> list[str]:
    return [
        f"{node.name}: {number}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        if (number := len(method.args.args) + len(method.args.kwonlyargs) - 1) > MAX_COLLABORATORS
    ]


def may_be_crowded(source: str) -> bool:
    """Whether commas of a constructor may part as many parameters; most files need no parser then."""
    heads = re.findall(r"def __init__\((.*?)\) ->", source, re.DOTALL)
    return any(head.count(",") >= MAX_COLLABORATORS for head in heads)


def test_a_constructor_takes_at_most_six_collaborators(sources: dict[str, str]) -> None:
    found = {file: crowded_constructors(text) for file, text in sources.items() if may_be_crowded(text)}

    assert {file: names for file, names in found.items() if names} == {}


def test_the_scan_of_constructors_counts_those_by_name_too() -> None:
    class_of = "class {}:\n  def __init__(self, {}): ...\n".format

    source = class_of("Six", "a, b, c, *, d, e, f") + class_of("Seven", "a, b, c, *, d, e, f, g")

    assert crowded_constructors(source) == ["Seven: 7"]
    assert may_be_crowded("class Seven:\n  def __init__(\n    self, a, b, c, *, d, e, f, g\n  ) -> None: ...")


def dangers(source: str) -> Iterator[str]:
    """Name each statement that runs code from bytes, or that ``python -O`` would remove."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert):
            yield f"line {node.lineno}: assert"
        elif isinstance(node, ast.Import):
            roots = {alias.name.partition(".")[0] for alias in node.names}
            yield from (f"line {node.lineno}: import {root}" for root in roots & RUN_CODE_FROM_BYTES)
        elif isinstance(node, ast.ImportFrom):
            root = (node.module or "").partition(".")[0]
            names = {(root, alias.name) for alias in node.names}
            if root in RUN_CODE_FROM_BYTES or names & RUN_CODE_CALLS:
                yield f"line {node.lineno}: from {node.module}"
        elif isinstance(node, ast.Attribute) and (ast.unparse(node.value), node.attr) in RUN_CODE_CALLS:
            yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.keyword) and node.arg in RUN_CODE_OPTIONS and ast.unparse(node.value) != "False":
            yield f"line {node.lineno}: {node.arg}"


def may_be_dangerous(source: str) -> bool:
    """Whether the words of a danger are there; most files need no parser then."""
    words = set(re.findall(r"\w+", source))
    return bool(words & {"assert", *RUN_CODE_FROM_BYTES, *RUN_CODE_OPTIONS}) or any(
        {root, name} <= words for root, name in RUN_CODE_CALLS
    )


CONFINED = "src/phalanx/models/unpickle.py"
"""The one reader of pickles: of plain tensors alone, and run by itself in a sandbox."""


def test_no_source_file_unpickles_or_asserts(sources: dict[str, str]) -> None:
    found = {file: list(dangers(text)) for file, text in sources.items() if may_be_dangerous(text)}

    assert [one.partition(": ")[2] for one in found.pop(CONFINED)] == ["torch.load"]
    assert {file: names for file, names in found.items() if names} == {}


def test_the_one_reader_of_pickles_takes_tensors_alone_and_is_called_in_the_sandbox_only() -> None:
    tree = ast.parse((ROOT / CONFINED).read_text(encoding="utf-8"))
    (loads,) = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]

    assert "weights_only=True" in [ast.unparse(keyword) for keyword in loads.keywords]
    rewriting = re.compile(r"import .*_rewrite|unpickle\.(main|_rewrite)")
    assert not [name_of(path) for path in FILES if rewriting.search(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as harmless",
        "from pickle import loads",
        "import os, dill",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "load = torch.load",
        "def f():\n  import marshal",
        "numpy.load(path, allow_pickle=True)",
        "AutoConfig.from_pretrained(path, trust_remote_code=trust)",
        "assert True",
    ],
)
def test_the_scan_finds_each_kind_of_danger(source: str) -> None:
    assert len(list(dangers(source))) == 1
    assert may_be_dangerous(source)


def test_the_drawn_tree_of_exceptions_is_the_tree_of_classes() -> None:
    classes = {
        name: value.__bases__[0].__name__
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value is not errors.PhalanxError
    }

    drawn = {name: parent for name, parent, _ in drawn_tree()}

    assert drawn == classes


def test_the_drawn_exit_codes_are_those_of_the_classes_and_of_the_help() -> None:
    from phalanx.cli.app import EXIT_CODES

    drawn = {name: int(code) for name, _, code in drawn_tree() if code}

    assert drawn == {name: getattr(errors, name).exit_code for name in drawn}
    assert len(set(drawn.values())) == len(drawn)
    documented = {int(code) for code in re.findall(r"\b(\d+) [a-z]", EXIT_CODES)}
    assert documented == {0, errors.PhalanxError.exit_code, 7, 130} | set(drawn.values())


def drawn_tree() -> Iterator[tuple[str, str, str]]:
    """Yield (class, parent, exit code or nothing) for each line of the drawing in errors.py."""
    parents = ["PhalanxError"]
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"    ([│ ]*)[├└]── (\w+)(?: +(\d+))?", line)
        if found:
            depth = len(found[1]) // 4 + 1
            parents[depth:] = [found[2]]
            yield found[2], parents[depth - 1], found[3] or ""


@pytest.mark.parametrize("address", [("192.0.2.1", 443), ("example.org", 443), ("2001:db8::1", 443, 0, 0)])
def test_no_test_can_reach_the_outside(address: tuple[str, int]) -> None:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET

    with socket.socket(family) as outside, pytest.raises(AssertionError, match="only loopback and unix"):
        outside.connect(address)


def test_no_test_replaces_the_clock_of_the_whole_process() -> None:
    """A server that other tests share in a thread would sleep until the false time: for hours, and its end with it."""
    clock = re.compile(r"""(setattr|patch)\(\s*(time,\s*["']|["'][\w.]*\btime\.)(monotonic|time|perf_counter)\b""")
    assert all(map(clock.search, ('patch("a.b.time.monotonic"', 'setattr(time, "time"')))

    assert [path for path in TESTS if path != Path(__file__) and clock.search(path.read_text("utf-8"))] == []


def test_no_test_imports_a_conftest() -> None:
    """All have one module name: which of them the import means depends on the tests that were collected before."""
    conftest = re.compile(r"^\s*(from|import) conftest\b", re.MULTILINE)
    assert all(map(conftest.search, ("from conftest import Tiny", "def test():\n    import conftest")))

    assert [path for path in TESTS if conftest.search(path.read_text("utf-8"))] == []


def test_test_files_have_unique_names() -> None:
    names = [path.name for path in TESTS if path.name not in ("conftest.py", "__init__.py")]

    assert sorted(names) == sorted(set(names))


OF_NO_PACKAGE = {"conformance", "deepspeed_engine", "multiproc", "vectors"}
"""Folders of tests that many packages fulfil together, and of data; `deepspeed` would hide the library of that name."""


@pytest.mark.parametrize("package", ["", "lab", "pipeline"])
def test_folders_of_tests_are_named_as_the_packages_they_test(package: str) -> None:
    tests, source = ROOT / "tests" / package, SOURCE / package

    folders = {path.parent.name for path in tests.glob("*/*.py")} - OF_NO_PACKAGE

    assert folders <= {path.parent.name for path in source.glob("*/__init__.py")} | {"adversary", "fuzz"}


def test_a_package_has_one_list_of_its_public_names() -> None:
    """``import X as X`` exports a name, and ``__all__`` would be a second list."""
    packages = {path: path.read_text(encoding="utf-8") for path in FILES if path.name == "__init__.py"}

    doubled = [name_of(path) for path, text in packages.items() if re.search(r"^__all__", text, re.MULTILINE)]

    assert [name for name in doubled if "/lab/" not in name] == []


def test_every_production_folder_is_kept_from_the_red_team() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (forbidden,) = (
        contract for contract in contracts if contract["type"] == "forbidden" and contract["id"] == "red-team"
    )
    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}

    guarded = {name.removeprefix("phalanx.") for name in forbidden["source_modules"]}

    assert folders - RED_TEAM - ABOVE_RED_TEAM <= guarded
    assert set(forbidden["forbidden_modules"]) == {f"phalanx.{name}" for name in RED_TEAM & folders}


def public_classes(sources: dict[str, str]) -> dict[str, list[str]]:
    """Name every public class with the files that define one of that name."""
    found: dict[str, list[str]] = {}
    for file, source in sources.items():
        for name in re.findall(r"^class ([^\W_]\w*)", source, re.MULTILINE):
            found.setdefault(name, []).append(file)
    return found


@pytest.fixture(scope="module")
def classes(sources: dict[str, str]) -> dict[str, list[str]]:
    return public_classes(sources)


def shared_names(classes: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: files for name, files in classes.items() if len(files) > 1}


def test_no_two_public_classes_have_one_name(classes: dict[str, list[str]]) -> None:
    assert shared_names(classes) == {}


def test_the_scan_of_class_names_finds_what_it_looks_for() -> None:
    classes = public_classes(
        {
            "a.py": "class Order: ...\nclass _Private: ...",
            "b.py": "class Order: ...\nclass _Private: ...",
        }
    )

    assert shared_names(classes) == {"Order": ["a.py", "b.py"]}


def states_shapes(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    nodes = ast.walk(ast.parse(text)) if "jaxtyping" in text else ()
    return any(isinstance(node, ast.ImportFrom) and node.module == "jaxtyping" for node in nodes)


def test_shapes_in_signatures_are_checked_in_every_test() -> None:
    stated = {path.relative_to(SOURCE).parts[0] for path in FILES if states_shapes(path)}
    conftest = ast.parse((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"))
    (checked,) = (
        ast.literal_eval(node.value)
        for node in conftest.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "STATE_SHAPES"
    )

    assert stated, "no signature states a shape"
    assert {f"phalanx.{package}" for package in stated} == set(checked)


FACES = [path for path in FILES if path.name == "__init__.py" and "late_names(" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", FACES, ids=pytest_ids(FACES))
def test_every_name_that_a_package_shows_to_type_checkers_is_there(path: Path) -> None:
    package = ".".join(("phalanx", *path.parent.relative_to(SOURCE).parts))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    shown = [
        alias.name
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]

    face = importlib.import_module(package)

    assert shown, "a face without a late name needs no late names"
    assert [name for name in shown if not hasattr(face, name)] == []
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'no_such_name'"):
        _ = face.no_such_name


def test_no_large_file_is_part_of_the_tree_but_raw_results() -> None:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("no list of files here: this is no clone")
    listed = subprocess.run([git, "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.split("\0") if name and not name.startswith("benchmarks/results/")]

    assert [path.name for path in paths if path.is_file() and path.stat().st_size > 1 << 20] == []
    # a link of a worktree once replaced the environment that it pointed to
    assert [path.name for path in paths if path.is_symlink()] == []


def test_every_folder_of_tests_is_collected(pytestconfig: pytest.Config) -> None:
    patterns = pytestconfig.getini("norecursedirs")
    folders = {folder.name for path in TESTS for folder in path.relative_to(ROOT).parents if folder.name}

    assert {name for name in folders for pattern in patterns if fnmatch(name, pattern)} == set()
