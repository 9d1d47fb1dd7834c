"""The demo on a smaller model: one liar is named, its work is undone, the weights are those of the clean run."""

from pathlib import Path

import pytest

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart.toml"
SMALL = (
    *("model.architecture.n_embd=32", "model.architecture.n_layer=4", "model.architecture.n_head=4"),
    *("model.architecture.n_positions=16", "model.architecture.vocab_size=300", "data.tokenizer.vocab_size=300"),
    *("data.sequence_length=16", "data.max_documents=12", "data.validation_share=0.2", "optimizer.warmup_steps=2"),
    *("train.steps=12", "train.validate_every=6", "checkpoint.every=6", "attack.from_step=3"),
)


@pytest.mark.slow
def test_the_demo_names_its_liar_undoes_its_work_and_says_so_last(place):
    place.run_file.write_text(QUICKSTART.read_text())

    clean = place.finish(*SMALL, "attack.kind='none'", run_dir="clean")
    process = place.train(*SMALL)
    assert process.wait() == 0, process.text
    summary = place.summary()

    assert (summary["evicted"], summary["false_accusations"], summary["in_doubt"]) == (["worker-1"], 0, False)
    assert summary["attacks_injected"] == summary["detections"] == 1
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    (verdict,) = summary["verdicts"]
    last = process.text.rstrip().splitlines()[-1]
    assert last.startswith(
        "What this run shows: of 1 step with a lie the guard detected 1 and named worker-1 at stage 1"
    )
    assert f"in step {verdict['step']};" in last and "no lie is in the weights" in last
