"""Print the house's numbers as the table of `docs/architecture.md`: how large it is, and how far a reader has to go.

``python scripts/house.py [--static]``

The first rows are read from the sources; the others from two simulated steps under ``sys.setprofile``, one honest and
one with a liar, and from a small run of ``phalanx train``. What only simulates or measures (`testing`, `lab`) is no
part of a step and is not counted there.
"""

import argparse
import ast
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "phalanx"
NOT_OF_A_STEP = ("testing", "lab")
JUDGES = {"a verdict is being found": "verify", "its evidence is judged again, offline judge included": "evidence"}
Graph = dict[str, set[str]]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--static", action="store_true", help="only what is read from the sources")
    static = parser.parse_args().static
    rows = static_rows() if static else {**static_rows(), **traced_rows()}
    sys.stdout.write("| what | number |\n|---|---|\n")
    sys.stdout.writelines(f"| {what} | {number:,} |\n" for what, number in rows.items())


def static_rows() -> dict[str, int]:
    """What the sources alone tell."""
    files = sorted(SOURCE.rglob("*.py"))
    graph = imports(files)
    return {
        "files": len(files),
        "lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files),
        "files in the largest folder, its rooms not counted": largest_folder(files),
        "files in an import circle": len(in_circles(graph)),
        "imports upwards, or between siblings, of what a contract ranks": len(upwards(graph, contracts())),
    }


def largest_folder(files: list[Path]) -> int:
    """Files of the fullest folder, without its face."""
    folders = [path.parent for path in files if path.name != "__init__.py"]
    return max(folders.count(folder) for folder in set(folders))


def module_of(path: Path) -> str:
    """Name of a file as Python imports it."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(files: list[Path]) -> Graph:
    """Which file imports which, inside functions too; what only a type checker imports is left out."""
    known = {module_of(path) for path in files}
    graph: Graph = {name: set() for name in known}
    for path in files:
        for node in executed(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in known else str(node.module) for name in names]
            else:
                continue
            graph[module_of(path)] |= {name for name in names if name in known}
    return graph


def executed(tree: ast.AST) -> Iterator[ast.stmt]:
    """All statements below, but for what stands under ``if TYPE_CHECKING``."""
    ahead: list[ast.AST] = [tree]
    while ahead:
        for child in ast.iter_child_nodes(ahead.pop()):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.stmt):
                yield child
            # no import stands in an expression
            if not isinstance(child, ast.expr):
                ahead.append(child)


def in_circles(graph: Mapping[str, set[str]]) -> set[str]:
    """Every file from which imports lead back to it."""
    return {name for name in graph if name in reached(graph, name)}


def reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Every file to which imports of one lead."""
    found: set[str] = set()
    ahead = set(graph[start])
    while ahead:
        found |= ahead
        ahead = set().union(*(graph[name] for name in ahead)) - found
    return found


def contracts() -> list[tuple[str, dict[str, int]]]:
    """Each package with ranked rooms, and the rank of each room; rooms of one rank are siblings."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    found = []
    for contract in tool["contracts"]:
        if contract["type"] == "layers":
            rooms = (
                (room.strip(" ()"), rank) for rank, rooms in enumerate(contract["layers"]) for room in rooms.split("|")
            )
            found += [(container, dict(rooms)) for container in contract["containers"]]
    return found


def upwards(graph: Mapping[str, set[str]], ranked: list[tuple[str, dict[str, int]]]) -> set[tuple[str, str]]:
    """Imports from a room to one that is not below it."""
    found = set()
    for container, ranks in ranked:
        for name, targets in graph.items():
            for target in targets:
                rooms = [part_below(container, each) for each in (name, target)]
                if rooms[0] != rooms[1] and all(room in ranks for room in rooms) and ranks[rooms[1]] <= ranks[rooms[0]]:
                    found.add((name, target))
    return found


def part_below(package: str, module: str) -> str:
    """The room of a package in which a file is; nothing outside of it."""
    return module.removeprefix(f"{package}.").partition(".")[0] if module.startswith(f"{package}.") else ""


class Trace:
    """What is called while it listens, in every thread that begins while it is installed."""

    def __init__(self) -> None:
        self.is_on = False
        self.files: set[str] = set()
        self.deepest = dict.fromkeys(JUDGES, 0)
        self._known: dict[CodeType, str] = {}

    def file_of(self, code: CodeType) -> str:
        """The file below `src/phalanx` that a step runs through; nothing for others."""
        if code not in self._known:
            path = Path(code.co_filename)
            inside = path.relative_to(SOURCE) if path.is_relative_to(SOURCE) else None
            is_ours = inside is not None and inside.parts[0] not in NOT_OF_A_STEP
            self._known[code] = str(inside) if is_ours else ""
        return self._known[code]

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Take note of one call."""
        if self.is_on and event == "call" and self.file_of(frame.f_code):
            self.files.add(self.file_of(frame.f_code))
            depth, rooms = self.depth(frame)
            for what, room in JUDGES.items():
                # what the owner's judges call in the offline judge's room is the offline judge's
                if room in rooms and (room == "evidence" or "evidence" not in rooms):
                    self.deepest[what] = max(self.deepest[what], depth)

    def depth(self, frame: FrameType | None) -> tuple[int, set[str]]:
        """Our named functions on the stack, the engine's step the first, and the rooms of the judges among them."""
        found, rooms = 0, set[str]()
        while frame is not None:
            file = self.file_of(frame.f_code)
            if file and not frame.f_code.co_name.startswith("<"):
                found += 1
                rooms |= {*Path(file).parts} & {*JUDGES.values()}
            if file.endswith("owner/engine.py") and frame.f_code.co_name == "train_turn":
                return found, rooms
            frame = frame.f_back
        return 0, set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Listen in this thread and in those that begin meanwhile."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def traced_rows() -> dict[str, int]:
    """What only a run tells."""
    from phalanx.testing import Actor, tampering  # noqa: PLC0415

    def lie(direction: str, step: int, microbatch: int, tensor: Any) -> Any:
        return -tensor if direction == "forward" else tensor

    with tempfile.TemporaryDirectory() as name:
        honest = traced_steps(Path(name) / "honest", {})
        liar = traced_steps(Path(name) / "liar", {"worker-1": Actor(tampering(lie))})
        way = way_to_the_step(Path(name))
    return {
        "files that one honest guarded step runs through, owner and workers": len(honest.files),
        **{f"our frames in the deepest stack while {what}": depth for what, depth in liar.deepest.items()},
        "calls from the verb `train` to the loop that calls `engine.step`": len(way),
        "files that these are in": len(set(way)),
    }


def traced_steps(directory: Path, actors: Mapping[str, Any]) -> Trace:
    """Simulated steps of four parties; the third one, in which everything has been set up, is listened to."""
    from phalanx.testing import MemoryCompany, tiny_run  # noqa: PLC0415

    trace = Trace()
    directory.mkdir()
    with trace.installed(), MemoryCompany(tiny_run(), directory, actors) as company:
        trace.is_on = bool(actors)  # a liar is met in the first step
        company.run(2)
        trace.is_on = True
        company.run(1)
        trace.is_on = False
    return trace


RUN = """
[model]
from_scratch = true
architecture = { model_type = "gpt2", vocab_size = 300, n_positions = 16, n_embd = 32, n_layer = 4, n_head = 4 }

[data]
sources = [{ kind = "python_manual" }]
tokenizer = { kind = "bpe", vocab_size = 300 }
sequence_length = 16
max_documents = 60
validation_share = 0.2

[train]
steps = 1
batch_size = 8
microbatches = 4

[optimizer]
lr = 1e-2
"""


def way_to_the_step(directory: Path) -> list[str]:
    """The file of each call after the verb's own, down to the one that calls the engine's step, in a real run."""
    from phalanx.cli.app import app  # noqa: PLC0415

    run_file = directory / "run.toml"
    run_file.write_text(RUN, encoding="utf-8")
    trace, way = Trace(), list[str]()

    def look(frame: FrameType, event: str, _: Any) -> None:
        file = trace.file_of(frame.f_code)
        if event == "call" and not way and file.endswith("owner/engine.py") and frame.f_code.co_name == "train_turn":
            way.extend(callers(trace, frame))

    sys.setprofile(look)
    try:
        with redirect_stdout(sys.stderr):
            app(["train", str(run_file), "--run-dir", str(directory / "run")], standalone_mode=False)
    finally:
        sys.setprofile(None)
    return way


def callers(trace: Trace, frame: FrameType) -> Iterator[str]:
    """Files of our calls above one, up to the verb's."""
    above = frame.f_back
    while above is not None and not trace.file_of(above.f_code).endswith("cli/train.py"):
        if trace.file_of(above.f_code):
            yield trace.file_of(above.f_code)
        above = above.f_back


if __name__ == "__main__":
    main()
