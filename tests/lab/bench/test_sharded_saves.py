"""The bench of saves: each way brings every number back, and says what it took."""

from pathlib import Path

import pytest

from phalanx.lab.bench.parallel.rank_saves import DCP, PIECES, RANK0
from phalanx.lab.bench.parallel.sharded_saves import measure_saves


@pytest.mark.slow
def test_every_way_restores_what_it_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))

    result = measure_saves(ranks=2, layers=2, width=32, rounds=1)

    rows = {row["way"]: row for row in result["rows"]}
    assert set(rows) == {RANK0, PIECES, DCP}
    assert all(row["is_equal"] for row in rows.values())
    # weights and two moments of float32, and what says where they are
    assert all(row["size_bytes"] > 12 * result["parameters"] for row in rows.values())
    assert rows[PIECES]["save"]["wall_over_pieces"] == 1.0
    assert all(len(row[act]["peak_bytes_by_rank"]) == 2 for row in rows.values() for act in ("save", "restore"))
