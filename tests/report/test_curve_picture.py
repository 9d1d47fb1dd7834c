import math
import re
import xml.etree.ElementTree as ET

import pytest
from made_run import make_run, write_lines

from phalanx.errors import InputError
from phalanx.report import write_curve_svg
from phalanx.report.svg import AxisScale, tick_label


@pytest.fixture
def runs(tmp_path):
    return {
        "clean": make_run(tmp_path / "clean", attacked=()),
        "attacked, guard off": make_run(tmp_path / "off", attacked=range(100, 200), guarded=False),
        "attacked, guarded": make_run(tmp_path / "guarded"),
    }


def test_every_run_is_drawn_named_and_its_attacks_marked(runs, tmp_path):
    out = write_curve_svg(runs, tmp_path / "docs" / "curve.svg")

    source = out.read_text()
    root = ET.fromstring(source)
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert set(runs) <= set(texts)
    assert {"attacked, repaired", "attacked, not repaired", "step", "loss (nats a token)"} <= set(texts)
    assert source.count('class="rug kbad"') == 100
    assert source.count('class="rug kgood"') == 1
    assert not re.search(r"<script|href|url\(", source)


def test_a_hostile_label_stays_text(runs, tmp_path):
    label = "</text><script>alert(1)</script>"

    out = write_curve_svg({label: runs["clean"]}, tmp_path / "curve.svg")

    assert "script" not in {node.tag.rpartition("}")[2] for node in ET.fromstring(out.read_text()).iter()}


def test_a_loss_that_explodes_is_drawn_by_logarithm(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": i, "loss": 10.0**i} for i in range(5)])

    out = write_curve_svg({"run": tmp_path}, tmp_path / "curve.svg")

    assert "log scale" in out.read_text()


def test_a_run_without_losses_is_named(runs, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()

    with pytest.raises(InputError, match=r"empty/metrics.jsonl: has no finite loss"):
        write_curve_svg({**runs, "empty": tmp_path / "empty"}, tmp_path / "curve.svg")


@pytest.mark.parametrize("number", [0, 8])
def test_too_few_or_too_many_runs_are_refused(runs, tmp_path, number):
    with pytest.raises(InputError, match=f"{number} runs to draw, expected 1 to 7"):
        write_curve_svg({str(i): runs["clean"] for i in range(number)}, tmp_path / "curve.svg")


def test_ticks_are_round_and_inside():
    scale = AxisScale(0.03, 1.97, (0.0, 100.0))

    assert scale.tick_values(5) == pytest.approx([0.5, 1.0, 1.5])
    assert AxisScale(1.0, 3.0, (0.0, 1.0)).tick_values(8, whole=True) == [1.0, 2.0, 3.0]
    assert AxisScale(1.0, 100.0, (0.0, 1.0), log=True).tick_values() == [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]


@pytest.mark.parametrize("low", [0.0, 5e-324, -3.0, 2.0**52 + 2, 1e200])
@pytest.mark.parametrize("ulps", [0, 1, 3])
def test_ends_that_are_neighbours_give_a_few_ticks(low, ulps):
    found = AxisScale(low, low + ulps * math.ulp(low), (0.0, 100.0)).tick_values(8, whole=True)

    assert len(found) <= 20


def test_a_scale_keeps_what_is_beyond_its_ends_at_the_ends():
    scale = AxisScale(0.0, 10.0, (100.0, 0.0))

    assert [scale(value) for value in (-5.0, 0.0, 2.5, 10.0, 99.0)] == [100.0, 100.0, 75.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("value", "label"),
    [(0.05, "0.05"), (1500, "1500"), (25000, "25k"), (3e6, "3M"), (2e9, "2G"), (-0.5, "-0.5")],
)
def test_tick_labels_are_short(value, label):
    assert tick_label(value) == label
