"""The bench of a split on a slow line, without the line: its rows, and what it says where it may not run."""

import pytest

from phalanx.errors import ConfigError
from phalanx.lab.bench.alone.split_line import ARMS, open_line, summarise_arm


def result(step_s, digest="ab"):
    return {"step_s": step_s, "line_bytes": 1000 * step_s, "cpu_s": 0.5, "weights_digest": digest}


def test_a_row_has_medians_of_its_turns_and_one_digest_or_none():
    row = summarise_arm("sealed", ARMS["sealed"], [result(1.0), result(3.0), result(2.0)])

    assert (row["arm"], row["mode"], row["width"]) == ("sealed", "sealed", 256)
    assert (row["step_s"], row["step_s_least"], row["step_s_most"]) == (2.0, 1.0, 3.0)
    assert (row["line_bytes"], row["weights_digest"]) == (2000.0, "ab")
    assert summarise_arm("sealed", ARMS["sealed"], [result(1.0), result(1.0, "cd")])["weights_digest"] is None


def test_where_no_line_can_be_made_the_command_and_what_it_needs_are_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(ConfigError, match=r"ip netns add .* needs Linux, root, ip and tc"), open_line(100):
        pytest.fail("there is a line")
