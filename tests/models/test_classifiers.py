"""Models that classify texts, exported: transformers and peft load them, and a text has the class of the training."""

import json

import pytest
import torch
from tiny_models import Held, build_all, chain, named, some_ids, tiny_source
from torch import nn
from transformers import AutoModelForTokenClassification

from phalanx.checkpoint.export import export_model, read_trained
from phalanx.errors import CheckpointError, ModelError
from phalanx.models import LoraConfig, PrefixConfig, SpfConfig
from phalanx.models.classifier import find_classifier_form

CLASSES = ("asthma", "diabetes", "none of them")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


class Classifying(Held):
    """A checkpoint of stages with a head of classes."""

    def __init__(self, stages, back_layers=None):
        super().__init__(stages)
        head = stages[-1].stage_heads()["lm_head"]
        self._tensors |= {f"weight/lm_head.{name}": value.detach() for name, value in head.named_parameters()}
        if back_layers is not None:
            self._tensors = {name: value for name, value in self._tensors.items() if back_layers(name)}


def trained_stages(source, adapter):
    stages = build_all(source, 2, adapter=adapter)
    head = nn.Linear(source.hub_config.hidden_size, len(CLASSES))
    stages[-1].replace_head(head)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for value in [*named(stages).values(), *head.parameters()]:
            if value.requires_grad:
                value.add_(torch.randn(value.shape, generator=generator), alpha=0.05)
    return stages


def load_whole(directory, **options):
    return AutoModelForTokenClassification.from_pretrained(directory, local_files_only=True, **options).eval()


@pytest.mark.parametrize("adapter", [None, LoraConfig(rank=2), SpfConfig(kind="spf", share=0.5)], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "bloom"])
def test_a_whole_classifier_has_the_logits_of_the_training_and_the_names_of_its_classes(cache, tmp_path, name, adapter):
    source, ids = tiny_source(name, cache), some_ids()
    stages = trained_stages(source, adapter)
    form = find_classifier_form(source, CLASSES, 17)

    export_model(Classifying(stages), source, tmp_path / "out", adapter=adapter, merge=True, classifier=form)

    loaded = load_whole(tmp_path / "out")
    assert loaded.config.id2label == dict(enumerate(CLASSES))
    torch.testing.assert_close(loaded(ids).logits, chain(stages, ids), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_of_the_layers_behind_a_cut_is_loaded_by_peft_with_its_head(cache, tmp_path):
    peft = pytest.importorskip("peft")
    source, ids, adapter = tiny_source("llama", cache), some_ids(), LoraConfig(rank=2)
    stages = trained_stages(source, adapter)
    with torch.no_grad():
        for key, value in named(stages).items():
            if ".layers.0." in key and "lora_B" in key:
                value.zero_()
    behind = Classifying(stages, lambda key: ".layers.0." not in key)

    form = find_classifier_form(source, CLASSES, 17)
    options = {"adapter": adapter, "classifier": form, "released": read_trained(behind)}
    export_model(behind, source, tmp_path / "peft", **options)
    export_model(behind, source, tmp_path / "whole", merge=True, **options)

    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    base = load_whole(source.directory, num_labels=len(CLASSES))
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "peft").eval()
    assert (config["task_type"], config["modules_to_save"]) == ("TOKEN_CLS", [form.head])
    assert config["layers_to_transform"] == list(range(1, source.num_layers))
    torch.testing.assert_close(loaded(ids).logits, chain(stages, ids), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(load_whole(tmp_path / "whole")(ids).logits, chain(stages, ids), rtol=1e-4, atol=1e-5)


def test_a_part_of_an_adapter_is_merged_as_one_only_where_a_run_trains_a_part(cache, tmp_path):
    source, adapter = tiny_source("llama", cache), LoraConfig(rank=2)
    part = Classifying(trained_stages(source, adapter), lambda key: ".layers.0." not in key)
    form = find_classifier_form(source, CLASSES, 17)

    with pytest.raises(CheckpointError, match=r"found nothing for .*layers\.0\."):
        export_model(part, source, tmp_path / "out", adapter=adapter, merge=True, classifier=form)


def test_what_transformers_or_peft_cannot_load_is_refused(cache, tmp_path):
    with pytest.raises(ModelError, match="opt: transformers has no class for its classifiers"):
        find_classifier_form(tiny_source("opt", cache), CLASSES, 17)
    source, adapter = tiny_source("llama", cache), PrefixConfig(kind="ptuning", tokens=2)
    stages = trained_stages(source, adapter)

    with pytest.raises(CheckpointError, match="only LoRA is exported with the head"):
        export_model(
            Classifying(stages),
            source,
            tmp_path / "out",
            adapter=adapter,
            classifier=find_classifier_form(source, CLASSES, 17),
        )
