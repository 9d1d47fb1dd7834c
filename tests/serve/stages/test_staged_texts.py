"""Texts of a model in stages are those of one process, and no honest party is ever accused."""

import asyncio
import json

import pytest
import torch
from stage_scene import ENGINE, Scene, texts_of, worker_file

from phalanx.errors import ConfigError, ModelError
from phalanx.models import ModelSource, weights_digest
from phalanx.serve.engine import BadRequestError, SamplingSettings
from phalanx.serve.stages import StagesConfig
from phalanx.serve.stages.blocks import StageBlocks
from phalanx.serve.stages.messages import StageOffer, StageStep, TokenPiece
from phalanx.serve.stages.staged_model import check_stageable, cut_layers
from phalanx.serve.stages.worker import StageHolder
from phalanx.transport.tensors import tensor_buffers
from tiny_served import write_model

PROMPTS = ["the", "in the end", "a" * 70, "é and é", "x", "the " * 60, "and in", "?!", "b" * 130, "end the day and"]


def test_a_model_in_stages_writes_what_one_process_writes_and_nobody_is_accused(directory, one_process, tmp_path):
    with Scene(tmp_path, directory) as scene:
        together = scene.texts(PROMPTS)
        alone = [text for prompt in PROMPTS for text in scene.texts([prompt])]
        drawn = scene.texts(PROMPTS * 3, 20, sampling=SamplingSettings(temperature=0.8, seed=5))
        rechecks = scene.rechecks()

    assert together == alone == texts_of(one_process, PROMPTS)
    assert drawn == texts_of(one_process, PROMPTS * 3, 20, sampling=SamplingSettings(temperature=0.8, seed=5))
    assert rechecks == ["yes"] * 50
    assert (scene.relay.verdicts, scene.relay.departures) == ([], {})


def test_the_draw_takes_about_its_share_and_the_log_says_which(directory, tmp_path):
    with Scene(tmp_path, directory, check_rate=0.5) as scene:
        for _ in range(4):
            scene.texts(PROMPTS, 2)
        rechecks = scene.rechecks()

    assert len(rechecks) == 40
    # of 40 fair draws fewer than 8 or more than 32 come once in 30,000 sessions; the key is fixed
    assert 8 <= rechecks.count("yes") <= 32
    assert rechecks.count("yes") + rechecks.count("no") == 40


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"model_type": "qwen3", "head_dim": 8}, marks=pytest.mark.slow),
        {"model_type": "mistral", "sliding_window": 4},
        pytest.param({"tie_word_embeddings": True}, marks=pytest.mark.slow),
    ],
    ids=["qwen3", "mistral window", "tied head"],
)
def test_other_families_write_the_same_in_stages(changes, tmp_path):
    from phalanx.serve.engine import BatchingEngine
    from tiny_served import UNMARKED, serve_model

    directory = write_model(tmp_path, num_hidden_layers=4, **changes)
    engine = BatchingEngine(serve_model(directory), ENGINE, UNMARKED)
    expected = texts_of(engine, PROMPTS[:4])
    engine.close()

    with Scene(tmp_path, directory) as scene:
        assert scene.texts(PROMPTS[:4]) == expected
        assert scene.rechecks() == ["yes"] * 4


def test_pieces_have_the_same_bits_in_any_company_and_in_one_run(directory):
    blocks = StageBlocks.read(ModelSource(directory), (1, 4))
    states = torch.randn(3, 90, blocks.width, generator=torch.Generator().manual_seed(1))
    cuts = [64, *[1] * 26]

    def run_alone(row):
        text = blocks.open_text()
        return torch.cat([blocks.extend([(text, len(part))], part) for part in torch.split(row, cuts)])

    alone = [run_alone(row) for row in states]
    texts = [blocks.open_text() for _ in states]
    together = [[] for _ in states]
    for step in zip(*(torch.split(row, cuts) for row in states), strict=True):
        outputs = blocks.extend([(text, len(part)) for text, part in zip(texts, step, strict=True)], torch.cat(step))
        for place, part in enumerate(torch.split(outputs, [len(part) for part in step])):
            together[place].append(part)
    text = blocks.open_text()
    whole = blocks.extend([(text, cut) for cut in cuts], states[0])

    for row, parts in zip(alone, together, strict=True):
        assert torch.equal(row, torch.cat(parts))
    assert torch.equal(whole, alone[0])


def test_embeddings_in_stages_are_those_of_one_process_and_redone_too(directory, one_process, tmp_path):
    texts = [(5, 6, 7), tuple(range(3, 90))]
    with Scene(tmp_path, directory) as scene:
        vectors = asyncio.run(scene.engine.embed_texts(texts, ""))
        rechecks = scene.rechecks()

    expected = asyncio.run(one_process.embed_texts(texts, ""))
    assert torch.allclose(torch.tensor(vectors), torch.tensor(expected), atol=1e-5)
    assert rechecks == ["yes"] * 2


def test_more_than_one_choice_is_refused_by_name(directory, tmp_path):
    with Scene(tmp_path, directory) as scene:
        (refusal,) = scene.texts(["the"], n=2)

    assert isinstance(refusal, BadRequestError)
    assert "more than one choice" in str(refusal)


def test_what_is_not_served_in_stages_is_refused_by_name(directory, tmp_path):
    config = StagesConfig(identity="", holders=(("a",), ("b",)))
    with pytest.raises(ConfigError, match="2 stages need one each"):
        cut_layers(3, config)
    assert cut_layers(8, config) == [(1, 4), (4, 7)]
    with pytest.raises(ConfigError, match="max_owner_prefix_tokens"):
        check_stageable(directory, ENGINE.model_copy(update={"max_owner_prefix_tokens": 64}))
    for changes, message in (
        ({"is_encoder_decoder": True}, "has an encoder"),
        ({"quantization_config": {}}, "quantised weights"),
    ):
        other = tmp_path / message.replace(" ", "-")
        other.mkdir()
        content = json.loads((directory / "config.json").read_text()) | changes
        (other / "config.json").write_text(json.dumps(content))
        with pytest.raises(ModelError, match=message):
            check_stageable(other, ENGINE)
    positions = write_model(tmp_path, model_type="gpt2", num_hidden_layers=4)
    with pytest.raises(ModelError, match="gpt2: its layers cannot be run apart"):
        StageBlocks.read(ModelSource(positions), (1, 3))
    with pytest.raises(ValueError, match="has two places"):
        StagesConfig(identity="", holders=(("a",), ("b", "a")))


def test_a_party_keeps_no_more_texts_and_tokens_than_its_file_allows(directory):
    source = ModelSource(directory)
    weights = StageBlocks.read(source, (1, 3)).weights
    offer = StageOffer(
        config=json.dumps(source.hub_config_dict),
        first_layer=1,
        end_layer=3,
        weights=weights_digest(weights.items()),
        size_bytes=1,
        tolerance=1e-4,
        max_texts=2,
        max_tokens=64,
    )
    holder = StageHolder(worker_file(max_texts=2, max_tokens=64))
    holder.admit_offer(offer)
    holder.load_stage(offer, weights)

    def ask(order, text, length, closed=(), start=0):
        piece = TokenPiece(text=text, start=start, length=length)
        step = StageStep(offer=offer.digest, order=order, pieces=(piece,), closed=closed)
        return holder.answer_step(step, "0" * 64, tensor_buffers(torch.zeros(length, source.hidden_size)))

    ask(0, 0, 30)
    ask(1, 1, 30)
    with pytest.raises(ModelError, match="2 texts with 65 tokens are more"):
        ask(2, 1, 5, start=30)
    with pytest.raises(ModelError, match="3 texts"):
        ask(3, 2, 1)
    ask(4, 3, 30, closed=(0, 1, 2))
    with pytest.raises(ModelError, match="the weights that came are not those"):
        holder.load_stage(offer.model_copy(update={"weights": "0" * 64}), weights)
    # a size that no machine has: the owner's config is compared with the owner's weights before it takes memory
    larger = json.dumps({**source.hub_config_dict, "intermediate_size": 2**40})
    with pytest.raises(ModelError, match="the weights are not those of the config"):
        holder.load_stage(offer.model_copy(update={"config": larger}), weights)
    with pytest.raises(ModelError, match="tolerance: would be judged by"):
        holder.admit_offer(offer.model_copy(update={"tolerance": 1e-6}))


class OtherMachine(StageHolder):
    """Honest, and rounds otherwise: it computes in float64 and sends float32."""

    def load_stage(self, offer, weights):
        super().load_stage(offer, weights)
        self._blocks._stage.double()

    def extend_texts(self, pieces, texts, hidden):
        return super().extend_texts(pieces, texts, hidden.double()).float()


def ask_on_other_machines(scene, num_texts, seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 200, (num_texts,), generator=generator).tolist()
    for begin in range(0, num_texts, 17):
        prompts = [chr(97 + place % 26) * size for place, size in enumerate(sizes[begin : begin + 17])]
        scene.texts(prompts, 6, sampling=SamplingSettings(temperature=1.0, seed=seed))
    return scene.rechecks()


@pytest.mark.parametrize("num_texts", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_honest_parties_that_round_otherwise_are_never_accused(num_texts, directory, tmp_path):
    holders = {name: OtherMachine(worker_file()) for name in ("front-1", "back-1")}
    with Scene(tmp_path, directory, holders) as scene:
        rechecks = ask_on_other_machines(scene, num_texts, 3)

    assert rechecks == ["yes"] * num_texts
    assert (scene.relay.verdicts, scene.relay.departures) == ([], {})
    assert 0.0 < scene.relay.worst_distance < scene.config.tolerance / 4
