"""Texts of a model in stages are those of one process, and no honest party is ever accused."""

from stage_scene import Scene, texts_of

PROMPTS = ["the", "in the end", "a" * 70, "é and é", "x", "the " * 60, "and in", "?!", "b" * 130, "end the day and"]


def test_a_model_in_stages_writes_what_one_process_writes(directory, one_process, tmp_path):
    with Scene(tmp_path, directory) as scene:
        texts = scene.texts(PROMPTS)
        rechecks = scene.rechecks()

    assert texts == texts_of(one_process, PROMPTS)
    assert rechecks == ["yes"] * len(PROMPTS)
    assert (scene.relay.verdicts, scene.relay.departures) == ([], {})
