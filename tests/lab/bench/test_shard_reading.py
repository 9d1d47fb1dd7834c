"""The bench of shards reads every window by every reader, and gives a row for each leaf size and epoch."""

from phalanx.lab.bench.measure.shard_reading import ReadingPlan, measure_reading


def test_each_reader_has_a_row_for_each_leaf_size_and_epoch() -> None:
    rows = measure_reading(ReadingPlan(tokens=20_000, window=101, leaf_bytes=(256, 4096), epochs=2))

    places = {(row["reading"], row["epoch"]) for row in rows}
    assert len(rows) == 12
    assert places == {(name, epoch) for name in ("memory map", "verified", "encrypted") for epoch in (1, 2)}
    assert all(row["tokens_per_s"] > 0 and row["leaf_read_us"] > 0 for row in rows)
