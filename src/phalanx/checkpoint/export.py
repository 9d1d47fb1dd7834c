"""A checkpoint as a directory in the hub's layout, which transformers and peft load."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import tokenizers
from safetensors.torch import save_file
from torch import Tensor

from phalanx.checkpoint.export_adapter import merge_weights, peft_files
from phalanx.checkpoint.load import Checkpoint
from phalanx.data import ChatCorpus, Corpus, TokenizerConfig
from phalanx.data.chat import TEMPLATE_FILE
from phalanx.data.preferences import PairCorpus
from phalanx.data.tokenizers import TextTokenizer, open_tokenizer, original_tokenizer, read_json, vocabulary_digest
from phalanx.errors import CheckpointError
from phalanx.models import AdapterConfig, ModelSource, parameter_names
from phalanx.models.cache import written_once
from phalanx.models.classifier import HEAD_TENSORS, ClassifierForm
from phalanx.models.directory import TOKENIZER, WEIGHTS, publish_model, refuse_existing, spare_directory
from phalanx.models.hub_files import GENERATION, architecture_of, copy_tokenizer, with_older_keys
from phalanx.models.weights import split_experts

_WEIGHT = "weight/"
_TOKENIZER_CONFIG, _SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
ADAPTER_CONFIG = "adapter_config.json"
_METADATA = {"format": "pt"}


@dataclass(frozen=True)
class RunTokenizer:
    """The tokenizer of a run.

    Attributes:
        file: Its tokenizer.json; companions such as a chat template lie beside it.
        eos_id: Token that ends a text.
        of_model: It came with the model; config and generation defaults of the model then name its tokens.
        template: The chat template that the run rendered conversations by; None of a run without conversations.
        end_of_turn: The token that ends an answer by it.
        mask_token: What the run hid tokens behind; None of a run that hides none.
    """

    file: Path
    eos_id: int
    of_model: bool
    template: Path | None = None
    end_of_turn: int | None = None
    mask_token: str | None = None

    @classmethod
    def from_config(cls, config: TokenizerConfig, source: ModelSource, corpus: Corpus | PairCorpus) -> "RunTokenizer":
        """Find the tokenizer file of the config, or else of the run."""
        file = original_tokenizer(config, source.tokenizer_path) or corpus.tokenizer_path
        run_tokenizer = cls(file, corpus.eos_id, of_model=config.kind == "model")
        if not isinstance(corpus, ChatCorpus | PairCorpus) or corpus.template is None:
            return run_tokenizer
        return replace(run_tokenizer, template=corpus.template, end_of_turn=corpus.end_of_turn)

    @classmethod
    def from_text_tokenizer(
        cls, config: TokenizerConfig, source: ModelSource, tokenizer: TextTokenizer, cache_dir: Path
    ) -> "RunTokenizer":
        """Find the tokenizer file of the config; one that was trained on labelled texts is written into the cache."""

        def write(target: Path) -> None:
            (target / TOKENIZER).write_bytes(tokenizer.to_json())

        file = original_tokenizer(config, source.tokenizer_path)
        if file is None:
            file = written_once(cache_dir / f"tokenizer-{vocabulary_digest(tokenizer)[:32]}", write) / TOKENIZER
        return cls(file, tokenizer.eos_id, of_model=config.kind == "model")


def export_model(
    checkpoint: Checkpoint,
    source: ModelSource,
    out: Path,
    *,
    adapter: AdapterConfig | None,
    merge: bool = False,
    tokenizer: RunTokenizer | None = None,
    released: Mapping[str, Tensor] | None = None,
    classifier: ClassifierForm | None = None,
) -> None:
    """Write config, weights, tokenizer and generation defaults; for an adapter, what peft writes instead of a model.

    Weights are float32, whole and un-sliced, whatever stages they were trained in. The directory appears in one go.

    Args:
        source: The model that was trained, or that the adapter belongs to.
        adapter: Trained adapter; None where all weights were trained.
        merge: Add the adapter to the model's own weights and write a whole model.
        released: Adapters that an enclave has let out, of the blocks behind its cut; its checkpoint is sealed.
        classifier: Form of a model that classifies texts; None of a language model.

    Raises:
        CheckpointError: `out` exists, cannot be written, or the checkpoint is not of this model, or of this vocabulary.
    """
    refuse_existing(out)
    if tokenizer is not None:
        checkpoint.check_vocabulary(vocabulary_digest(open_tokenizer(tokenizer.file, tokenizer.eos_id)))
    trained, is_part = (read_trained(checkpoint), False) if released is None else (released, True)
    with spare_directory(out) as spare:
        config = None
        if adapter is not None and not merge:
            config, named = peft_files(trained, source, adapter, classifier, is_part=is_part)
            save_file(named, spare / "adapter_model.safetensors", _METADATA)
        else:
            weights = trained if adapter is None else merge_weights(trained, source, adapter, is_part=is_part)
            write_weights(spare, weights, source, classifier)
        write_companions(spare, source, tokenizer, config, classifier)
        publish_model(spare, out)


def read_trained(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return what was trained, by the names of the run."""
    return {
        name.removeprefix(_WEIGHT): checkpoint.read_tensor(name)
        for name in checkpoint.stages_by_tensor()
        if name.startswith(_WEIGHT)
    }


def write_weights(
    target: Path, weights: Mapping[str, Tensor], source: ModelSource, classifier: ClassifierForm | None = None
) -> None:
    """Write the weights of a whole model."""
    save_file(name_weights(weights, source, classifier), target / WEIGHTS, _METADATA)


def name_weights(
    weights: Mapping[str, Tensor], source: ModelSource, classifier: ClassifierForm | None = None
) -> dict[str, Tensor]:
    """Return the weights of a whole model by the names in its file."""
    expected = set(parameter_names(source.hub_config))
    if classifier is not None:
        expected |= HEAD_TENSORS
    if set(weights) != expected:
        differing = sorted(expected ^ set(weights))
        raise CheckpointError(f"{differing[:3]} differ from the model's parameters; use the run's own model")
    if classifier is not None:
        weights = classifier.rename_head(weights)
    return {
        source.family.hub_name(piece): part.contiguous()
        for name, tensor in weights.items()
        for piece, part in split_experts(source.family, name, tensor)
    }


def write_companions(
    target: Path,
    source: ModelSource,
    tokenizer: RunTokenizer | None,
    adapter_config: Mapping[str, object] | None = None,
    classifier: ClassifierForm | None = None,
) -> None:
    """Write all that an export has beside its tensors: config, generation defaults and tokenizer.

    Args:
        adapter_config: Content of ``adapter_config.json``; None of a whole model.
    """
    if adapter_config is None:
        _write_config(target, source, tokenizer, classifier)
    else:
        (target / ADAPTER_CONFIG).write_text(json.dumps(adapter_config, indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        _write_tokenizer(target, tokenizer)


def _write_config(
    target: Path, source: ModelSource, tokenizer: RunTokenizer | None, classifier: ClassifierForm | None
) -> None:
    config = {**with_older_keys(source.hub_config_dict), "dtype": "float32"}
    # servers and converters tell the kind of model by it
    if config.get("tie_word_embeddings") and not source.family.ties_head(source.hub_config):
        # a T5 of version 1.1: transformers 4 and others read nothing else for it
        config["tie_word_embeddings"] = False
    if classifier is None:
        config["architectures"] = config.get("architectures") or [architecture_of(source.hub_config.model_type)]
    else:
        config |= classifier.describe_classes()
    generation = source.directory / GENERATION
    if tokenizer is not None and not tokenizer.of_model:
        ends = {"bos_token_id": tokenizer.eos_id, "eos_token_id": tokenizer.eos_id}
        pad = config.get("pad_token_id")
        config |= {**ends, "pad_token_id": None if pad is None or pad >= source.vocab_size else pad}
        _write_json(target / GENERATION, ends)
    elif generation.is_file():
        shutil.copyfile(generation, target / GENERATION)
    if tokenizer is not None and tokenizer.end_of_turn is not None:
        _end_answers(target / GENERATION, tokenizer.end_of_turn, config.get("eos_token_id"))
    ends_answers = () if tokenizer is None else (tokenizer.eos_id, tokenizer.end_of_turn)
    if source.head_kind == "score" and config.get("pad_token_id") in ends_answers:
        # transformers takes the score before the first padding, and that of an answer is its end's
        config["pad_token_id"] = None
    _write_json(target / "config.json", config)


def _end_answers(path: Path, end_of_turn: int, end_of_text: object) -> None:
    """Add the token that ends an answer to those at which the model stops writing."""
    written = read_json(path)
    ends = written.get("eos_token_id", end_of_text)
    eos_ids = [eos for eos in (ends if isinstance(ends, list) else [ends]) if isinstance(eos, int)]
    _write_json(path, {**written, "eos_token_id": list(dict.fromkeys([*eos_ids, end_of_turn]))})


def copy_run_tokenizer(tokenizer: RunTokenizer, target: Path) -> None:
    """Copy a run's tokenizer with its companions, and the chat template of the run in the place of the model's."""
    copy_tokenizer(tokenizer.file, target)
    if tokenizer.template is not None:
        shutil.copyfile(tokenizer.template, target / TEMPLATE_FILE)


def _write_tokenizer(target: Path, tokenizer: RunTokenizer) -> None:
    copy_run_tokenizer(tokenizer, target)
    if not (target / _TOKENIZER_CONFIG).is_file():
        end = tokenizers.Tokenizer.from_file(str(tokenizer.file)).id_to_token(tokenizer.eos_id)
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end}
        _write_json(target / _TOKENIZER_CONFIG, named)
    if tokenizer.mask_token is not None:
        for name in (_TOKENIZER_CONFIG, _SPECIAL_TOKENS):
            _name_mask(target / name, tokenizer.mask_token)


def _name_mask(path: Path, mask_token: str) -> None:
    """Name the mask in a tokenizer's file, in the place of another one; a model's own description of it stays."""
    written = read_json(path) if path.is_file() else None
    if not isinstance(written, dict):
        return
    named = written.get("mask_token")
    if (named.get("content") if isinstance(named, dict) else named) != mask_token:
        _write_json(path, {**written, "mask_token": mask_token})


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
