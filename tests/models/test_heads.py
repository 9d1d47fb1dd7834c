"""Heads: a score instead of words, or beside them; sliced as whole, drawn once, trained beside adapters, exported."""

import json

import pytest
import torch
from planned_models import PLANNED
from tiny_models import ARCHITECTURES, Held, build_all, chain, named, some_ids, tiny_source, whole_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from phalanx.checkpoint.export import export_model
from phalanx.errors import ModelError
from phalanx.models import LoraConfig, ModelConfig, ModelSource, open_model
from phalanx.models.build import parameter_shapes
from phalanx.planner import shape_of
from phalanx.serve.text_model import TextModel


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "opt-untied", "bloom"])
@pytest.mark.parametrize("head", ["score", "lm_and_score"])
def test_stages_with_a_score_compute_what_the_hubs_classes_compute(cache, tmp_path, name, head):
    plain = tiny_source(name, cache)
    source, ids = plain.with_head(head), some_ids()
    stages = build_all(source, 3)
    export_model(Held(stages), source, tmp_path / "out", adapter=None)
    found = chain(stages, ids)

    if head == "score":
        whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", local_files_only=True)
        hidden = whole.base_model(ids)[0]
        # one column is multiplied in another order where a file's bytes are aligned otherwise
        torch.testing.assert_close(found, whole.score(hidden), rtol=1e-6, atol=1e-7)
        assert whole.num_labels == 1
        # without the token that OPT pads with, which transformers would take for the end
        one = ids[:1].clamp(min=5)
        torch.testing.assert_close(whole(one).logits[0], chain(stages, one)[0, -1], rtol=1e-6, atol=1e-7)
    else:
        assert torch.equal(found[..., :-1], chain(build_all(plain, 3), ids))
        assert found.shape[-1] == source.vocab_size + 1
    again = ModelSource(tmp_path / "out")
    assert again.head_kind == head
    assert torch.equal(chain(build_all(again, 2), ids), found)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("head", ["score", "lm_and_score"])
def test_the_planner_counts_the_head_that_is_there(cache, name, head):
    source = tiny_source(name, cache).with_head(head)

    planned = shape_of(source.hub_config_dict)

    counted = sum(torch.Size(shape).numel() for shape in parameter_shapes(source.hub_config).values())
    assert planned.num_parameters == counted


def test_a_new_score_depends_on_the_seed_alone_and_is_trained_beside_an_adapter(cache):
    source = tiny_source("llama", cache).with_head("score")
    two, three = (named(build_all(source, stages, adapter=LoraConfig(rank=2))) for stages in (2, 3))

    assert torch.equal(two["score.weight"], three["score.weight"])
    assert 0.005 < float(two["score.weight"].detach().std()) < 0.05
    trained = {name for name, value in two.items() if value.requires_grad}
    assert "score.weight" in trained
    assert all("lora" in name for name in trained - {"score.weight"})
    assert not torch.equal(named(build_all(source, 2, seed=1))["score.weight"], two["score.weight"])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_takes_its_score_along(cache, tmp_path):
    source = tiny_source("llama", cache).with_head("score")
    adapter = LoraConfig(rank=2)
    stages = build_all(source, 2, adapter=adapter)
    with torch.no_grad():
        for value in named(stages).values():
            if value.requires_grad:
                value.add_(0.01)
    export_model(Held(stages), source, tmp_path / "peft", adapter=adapter)
    export_model(Held(stages), source, tmp_path / "whole", adapter=adapter, merge=True)
    peft = pytest.importorskip("peft")

    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    base = AutoModelForSequenceClassification.from_pretrained(source.directory, num_labels=1, local_files_only=True)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "peft")
    one = some_ids(1)

    expected = chain(stages, one)[0, -1]
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    torch.testing.assert_close(loaded(one).logits[0], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(chain(build_all(ModelSource(tmp_path / "whole"), 2), one)[0, -1], expected)


def test_a_model_that_scores_is_no_language_model_again_and_writes_no_text(cache, tmp_path):
    source = tiny_source("llama-tied", cache).with_head("score")
    export_model(Held(build_all(source, 2)), source, tmp_path / "out", adapter=None)
    scores = ModelSource(tmp_path / "out")

    with pytest.raises(ModelError, match="gives scores, and has no language model's head; take another model"):
        scores.with_head("lm")
    with pytest.raises(ModelError, match="gives each text a score, and has no language model's head"):
        TextModel(tmp_path / "out")
    assert scores.with_head("score") is scores


def test_a_family_without_a_class_for_scores_is_refused_by_name(cache):
    with pytest.raises(
        ModelError, match=r'model.head = "score": transformers has no class that scores texts for cohere'
    ):
        open_model(ModelConfig(architecture=PLANNED["cohere"], from_scratch=True, head="score"), cache, 0)


def test_the_other_way_a_value_beside_words_loads_as_a_language_model(cache, tmp_path):
    source = tiny_source("llama", cache).with_head("lm_and_score")
    export_model(Held(build_all(source, 2)), source, tmp_path / "out", adapter=None)

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)

    ids = some_ids()
    assert torch.equal(plain(ids).logits, whole_model(tiny_source("llama", cache))(ids).logits)
    assert ModelSource(tmp_path / "out").with_head("lm").head_kind == "lm"


def test_a_run_without_a_head_of_its_own_has_the_digest_that_it_had():
    written = ModelConfig(path="somewhere").model_dump(mode="json")

    assert "head" not in written
    assert ModelConfig(path="somewhere", head="score").model_dump(mode="json")["head"] == "score"
