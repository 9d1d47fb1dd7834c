"""The house's numbers on the architecture page are those that `scripts/house.py` prints."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
NEAR = 0.05
"""Files and lines grow with every change; the page may be this far behind."""


@pytest.fixture(scope="module")
def house():
    spec = importlib.util.spec_from_file_location("house", ROOT / "scripts" / "house.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found(house):
    return house.static_rows()


def written():
    """Each row of the page's table."""
    section = PAGE.partition("## The house in numbers")[2].partition("\n## ")[0]
    return {
        what: int(number.replace(",", "")) for what, number in re.findall(r"^\| (.+) \| ([\d,]+) \|$", section, re.M)
    }


def test_files_and_lines_of_the_page_are_not_far_behind(found):
    for what in ("files", "lines"):
        assert written()[what] == pytest.approx(found[what], rel=NEAR)


def test_the_page_has_every_other_number_exactly(found):
    exact = {what: number for what, number in found.items() if what not in ("files", "lines")}

    assert {what: written()[what] for what in exact} == exact


def test_the_house_keeps_its_bounds(found):
    folder, circles, upwards = list(found.values())[2:]

    assert folder < 30
    assert circles == 0
    assert upwards == 0


def test_a_circle_is_found_with_all_of_its_files(house):
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}

    assert house.in_circles(graph) == {"b", "c"}


def test_an_import_upwards_and_one_between_siblings_are_found(house):
    ranked = [("p", {"high": 0, "left": 1, "right": 1, "low": 2})]
    graph = {"p.high.x": {"p.low.y"}, "p.low.y": {"p.left.z"}, "p.left.z": {"p.right.w", "p.left.v", "q.high"}}

    assert house.upwards(graph, ranked) == {("p.low.y", "p.left.z"), ("p.left.z", "p.right.w")}


def test_imports_inside_functions_count_and_those_of_a_type_checker_do_not(house):
    source = "if TYPE_CHECKING:\n    import a\ndef f():\n    import b\n"

    nodes = list(house.executed(house.ast.parse(source)))

    assert [node.names[0].name for node in nodes if isinstance(node, house.ast.Import)] == ["b"]
