"""The bar of a build: phases, MB/s and drops by step on a terminal, and nothing where there is none."""

import io

from rich.console import Console

from phalanx.cli.data.progress import BuildBar


def shown(*, terminal):
    """Return what a bar of two phases writes."""
    stream = io.StringIO()
    with BuildBar(Console(file=stream, force_terminal=terminal, width=160, color_system=None)) as bar:
        bar.begin_phase("read", 2, 3_000_000)
        bar.finish_piece(1_000_000, {"length": 3, "equal": 1})
        bar.finish_piece(2_000_000, {"length": 2})
        bar.begin_phase("encode", 2, 0)
        bar.finish_piece(0, {})
    return stream.getvalue()


def test_a_terminal_sees_phases_speed_and_drops_by_step():
    said = shown(terminal=True)

    assert "read, 3.0 MB" in said
    assert "MB/s" in said
    assert "2/2" in said
    assert "left out: length 5, equal 1" in said
    assert "encode" in said


def test_where_there_is_no_terminal_nothing_is_shown():
    assert shown(terminal=False) == ""
