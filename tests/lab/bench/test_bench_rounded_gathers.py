"""The bench of rounded exchanges: fewer bytes, and losses that are near."""

from pathlib import Path

import pytest

from phalanx.lab.bench.parallel import rounded_gathers


@pytest.mark.slow
def test_rounded_exchanges_send_less_and_learn_nearly_alike(
    tiny: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))
    monkeypatch.setattr(rounded_gathers, "small_run", lambda: tiny)

    result = rounded_gathers.measure_exchanges(ranks=2, steps=8)

    exact, gathers, both = result["rows"]
    assert [row["gradient_compression"] for row in result["rows"]] == ["none", "int8_gathers", "int8"]
    assert (exact["bytes_over_exact"], exact["max_rel_loss_diff"]) == (1.0, 0.0)
    assert both["sent_bytes_per_step"] < gathers["sent_bytes_per_step"] < exact["sent_bytes_per_step"]
    assert 0 < gathers["max_rel_loss_diff"] < 0.01
    assert 0 < both["max_rel_loss_diff"] < 0.01
