"""A model and its tokenizer, that go on with a text or answer in a chat; transformers generates, with a KV cache."""

import hashlib
import json
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import tokenizers
import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.utils import logging as hub_logging

from phalanx.data.borders import bare_encoder, border_of, drop_trailing_ids
from phalanx.data.chat import ChatEncoder, ChatMessage, model_template
from phalanx.data.chat.conversation import Conversation
from phalanx.data.normal_form import check_text
from phalanx.errors import DataError, ModelError
from phalanx.models.classifier import CLASSIFIER_KEY
from phalanx.models.digest import weights_digest
from phalanx.models.directory import read_config
from phalanx.models.families import TRANSFORMERS_REFUSALS
from phalanx.models.weights import check_claims
from phalanx.planner.model.families import FAMILIES
from phalanx.planner.model.shape import head_kind
from phalanx.serve.sampling import Completion, SamplingRule
from phalanx.serve.stage_line import StageChain, model_in_stages

_TEXT_BORDERS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache")
_NOT_FINITE = "a logit is no finite number; the weights are damaged or training had diverged"


class TextModel:
    """A language model with its tokenizer, in this process; one with an encoder reads prompts there, and answers them.

    Args:
        directory: Hub layout with a tokenizer; nothing is downloaded and none of its code is run.
        stages: Into how many processes the layers are cut; 1 keeps them in this one.

    Raises:
        ModelError: It is no model that transformers loads from safetensors, or its tokenizer is of another model.
    """

    def __init__(self, directory: Path, device: str = "cpu", stages: int = 1) -> None:
        self._where = directory
        self._end: weakref.finalize[..., TextModel] | None = None
        self.stage_processes: list[int] = []
        # the directory may be gone when the first chat comes
        self._template = model_template(directory)
        # a text is all that a terminal should show
        hub_logging.disable_progress_bar()
        self._described = config = read_config(directory)
        if head_kind(config) == "score":
            raise ModelError(f"{directory}: gives each text a score, and has no language model's head")
        if CLASSIFIER_KEY in config:
            raise ModelError(f"{directory}: classifies texts and writes none; use phalanx classify")
        family = FAMILIES.get(str(config.get("model_type")))
        if family is not None and family.predicts == "hidden":
            raise ModelError(
                f"{directory}: {config['model_type']} is an encoder, and texts are written by decoders alone; give a "
                "model with a decoder, or call transformers"
            )
        self._has_encoder = family is not None and family.predicts == "target"
        if self._has_encoder and stages > 1:
            raise ModelError(f"--stages {stages}: {config['model_type']} has an encoder, which stages cannot keep; 1")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
            kind = AutoModelForSeq2SeqLM if self._has_encoder else AutoModelForCausalLM
            self._model: Any = (
                self._load_model(directory, device, kind)
                if stages == 1
                else self._start_stages(directory, device, stages)
            )
        except (OSError, SafetensorError, *TRANSFORMERS_REFUSALS) as exc:
            raise ModelError(f"{directory}: no model that can write texts ({str(exc)[:300]})") from exc
        # the other defaults in the model's file would change texts beside the rule of a request, and are in no digest
        borders = {name: getattr(self._model.generation_config, name) for name in _TEXT_BORDERS}
        self._model.generation_config = GenerationConfig(**borders)
        rows = self._model.get_input_embeddings().weight.shape[0]
        if len(self._tokenizer) > rows:
            raise ModelError(
                f"{directory}: the tokenizer has {len(self._tokenizer)} tokens, the model embeddings for {rows}; "
                "give the tokenizer that the model was trained with"
            )

    @staticmethod
    def _load_model(directory: Path, device: str, kind: Any = AutoModelForCausalLM) -> Any:
        check_claims(directory, kind)
        model, report = kind.from_pretrained(
            directory,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype="auto",
            output_loading_info=True,
        )
        if report["missing_keys"]:
            raise ModelError(f"{directory}: lacks the tensors {', '.join(sorted(report['missing_keys']))[:300]}")
        for parameter in model.parameters():
            # a file's bytes lie at any address, and products of a single token round by it
            parameter.data = parameter.data.clone()
        if model.config.is_encoder_decoder and model.config.num_decoder_layers > model.config.num_hidden_layers:
            # transformers makes a cache of as many layers as the encoder has
            model.generation_config.use_cache = False
        return model.to(device).eval()

    def _start_stages(self, directory: Path, device: str, stages: int) -> Any:
        if device != "cpu":
            raise ModelError(f"--device {device}: stages run on the processor; leave --device or --stages out")
        stage_line = StageChain(directory, stages)
        self.stage_processes = stage_line.process_ids
        self._end = weakref.finalize(self, stage_line.close)
        return model_in_stages(directory, stage_line)

    def close(self) -> None:
        """End the processes of stages, where there are any."""
        if self._end is not None:
            self._end()

    @property
    def context_length(self) -> int:
        """Tokens that a prompt and its continuation may have together."""
        return int(getattr(self._model.config, "max_position_embeddings", 0) or 1 << 20)

    @property
    def module(self) -> Any:
        """The model that transformers loaded."""
        return self._model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that transformers loaded."""
        return self._tokenizer

    @property
    def has_encoder(self) -> bool:
        """Whether an encoder reads the prompt."""
        return self._has_encoder

    @property
    def has_template(self) -> bool:
        """Whether the model comes with a chat template."""
        return self._template is not None

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a text."""
        return frozenset(_end_tokens(self._model))

    def end_of_turn(self) -> int | None:
        """Return the special token that ends an assistant's turn by the chat template; None where there is none."""
        return self._chat_encoder.end_of_turn

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a text that is to be continued.

        Raises:
            DataError: It is no text, has no token, or leaves no room in the window.
        """
        check_text(text, "prompt")
        ids, bare = (list(self._tokenizer(text, add_special_tokens=adds).input_ids) for adds in (True, False))
        # an encoder reads a whole text; elsewhere nothing is written behind the end of one
        return self._check_ids(ids if self._has_encoder else drop_trailing_ids(ids, bare))

    def chat_prompt(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Token ids of a chat, up to where the assistant begins, by the model's own template.

        Raises:
            DataError: There is no message, the last one is the assistant's, one of them holds a special token, or the
                template refuses them.
            ModelError: The model has no chat template, or it does what no template may.
        """
        if not messages or messages[-1].role == "assistant":
            raise DataError("messages: expected at least one, the last of which is not the assistant's")
        return self._check_ids(self._chat_encoder.encode_prompt(messages, tools, is_whole=False))

    def render_prompt(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]] = ()) -> str:
        """Return the text of a chat up to where the assistant begins.

        Raises:
            ModelError: The model has no chat template, or it does what no template may.
        """
        return self._chat_encoder.renderer.render_prompt(messages, tools)

    def render_conversation(self, conversation: Conversation) -> str:
        """Return the text of a whole conversation.

        Raises:
            ModelError: The model has no chat template, or it does what no template may.
        """
        return self._chat_encoder.renderer.render_conversation(conversation, len(conversation.messages)).text

    @cached_property
    def _chat_encoder(self) -> ChatEncoder:
        template_source = self._template
        if template_source is None:
            raise ModelError(
                f"{self._where}: has no chat template; give it a prompt, or take a model that was tuned for chats"
            )
        if not self._tokenizer.is_fast:
            raise ModelError(f"{self._where}: has no tokenizer.json; `phalanx model import` makes one")
        # those of the tokenizer's class as well as those of its files
        tokens = {name: str(token) for name, token in self._tokenizer.special_tokens_map.items()}
        template = replace(template_source, tokens=tokens)
        return ChatEncoder(template, self._tokenizer.backend_tokenizer, datetime.now(tz=UTC).date())

    def stream_text(self, ids: Sequence[int], sampling: SamplingRule) -> "TextStream":
        """Go on with a prompt; the pieces of text come while they are written."""
        return TextStream(self._model, self._tokenizer, ids, sampling, self.context_length)

    def complete_prompt(self, ids: Sequence[int], sampling: SamplingRule) -> Completion:
        """Go on with a prompt, to the end."""
        with self.stream_text(ids, sampling) as stream:
            for _ in stream:
                pass
            return stream.completion

    def complete_batch(self, prompts: Sequence[Sequence[int]], sampling: SamplingRule) -> list[Completion]:
        """Go on with several prompts at once; the same batch, model and seed give the same texts."""
        width = max(map(len, prompts))
        pad = min(_end_tokens(self._model), default=0)
        ids = torch.tensor(
            [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=self._model.device
        )
        seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=ids.device)
        max_new_tokens = min(sampling.max_new_tokens, self.context_length - width)
        try:
            outputs = _run_generate(self._model, ids, seen, sampling, max_new_tokens).tolist()
        except (RuntimeError, ValueError, IndexError) as exc:
            raise ModelError(f"the model cannot go on: {exc}") from exc
        return [self._make_completion(prompt, written) for prompt, written in zip(prompts, outputs, strict=True)]

    def _make_completion(self, prompt: Sequence[int], written: Sequence[int]) -> Completion:
        ends = _end_tokens(self._model)
        # behind the end of a text there is padding, where another one of its batch went on
        tokens = next((index + 1 for index, token in enumerate(written) if token in ends), len(written))
        is_over = bool(tokens) and written[tokens - 1] in ends
        text = self._tokenizer.decode(written[:tokens], skip_special_tokens=True)
        return Completion(text=text, prompt_tokens=len(prompt), tokens=tokens, finish="stop" if is_over else "length")

    def log_probs(self, prompt: str | Sequence[int], endings: Sequence[str]) -> list[float]:
        """Return the log-probability of each of some texts behind a prompt, all its tokens together.

        Prompt and text are encoded as one, as the model reads them; a token that reaches over the border is the text's.

        Args:
            prompt: As text, or as the tokens of one. Behind tokens that no text has, and where a vocabulary of whole
                words has none for two that are written together, a text is encoded by itself.

        Raises:
            DataError: One has no token, or does not fit into the window.
        """
        if isinstance(prompt, str):
            if self._has_encoder:
                return self._log_probs_apart(self.encode_prompt(prompt), endings)
            pairs = [self._encode_joined(prompt, ending) for ending in endings]
            return [self._log_prob(before, own, ending) for (before, own), ending in zip(pairs, endings, strict=True)]
        text = None if self._has_encoder else self._text_of(prompt)
        is_joined = text is not None and not any(self._is_unknown(text, ending) for ending in endings)
        return (
            self.log_probs(text, endings) if text is not None and is_joined else self._log_probs_apart(prompt, endings)
        )

    def _is_unknown(self, text: str, ending: str) -> bool:
        """Return whether two texts of known words are an unknown one together."""
        unknown = self._tokenizer.unk_token_id
        return unknown in self._encode_joined(text, ending)[1] and unknown not in self._encode_joined("", ending)[1]

    def _text_of(self, ids: Sequence[int]) -> str | None:
        """Return the text of which these are the tokens; None where there is none."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        whole, _ = self._encode_joined(text, "")
        return text if whole == list(ids) else None

    def _log_probs_apart(self, ids: Sequence[int], endings: Sequence[str]) -> list[float]:
        """Return the same where a text begins by itself, as behind an encoder."""
        endings_ids = (list(self._tokenizer(ending, add_special_tokens=False).input_ids) for ending in endings)
        return [self._log_prob(ids, own, ending) for own, ending in zip(endings_ids, endings, strict=True)]

    def _encode_joined(self, prompt: str, ending: str) -> tuple[list[int], list[int]]:
        """Split the ids of a prompt and its ending, tokenized as one text, into the ids of each."""
        whole = prompt + ending
        ids, bare = (list(self._tokenizer(whole, add_special_tokens=adds).input_ids) for adds in (True, False))
        ids = drop_trailing_ids(ids, bare)
        if self._tokenizer.is_fast:
            border = border_of(self._bare_encoder.encode(whole, add_special_tokens=False), whole, len(prompt))
        else:
            # without offsets: as far as the prompt alone has the same ids
            alone = list(self._tokenizer(prompt, add_special_tokens=False).input_ids)
            parts = (at for at, (one, other) in enumerate(zip(alone, bare, strict=False)) if one != other)
            border = next(parts, min(len(alone), len(bare)))
        begin = len(ids) - len(bare) + border
        return ids[:begin], ids[begin:]

    @cached_property
    def _bare_encoder(self) -> tokenizers.Tokenizer:
        return bare_encoder(self._tokenizer.backend_tokenizer, special_is_text=False)

    def chat_log_probs(self, messages: Sequence[ChatMessage], endings: Sequence[str]) -> list[float]:
        """Return the log-probability of each of some texts behind a chat; chat and text are encoded as one."""
        ids = self.chat_prompt(messages)
        if self._has_encoder:
            return self._log_probs_apart(ids, endings)
        pairs = (self._chat_encoder.encode_ending(messages, ending) for ending in endings)
        return [
            self._log_prob(before, ending_ids, ending)
            for (before, ending_ids), ending in zip(pairs, endings, strict=True)
        ]

    def _log_prob(self, ids: Sequence[int], own: Sequence[int], ending: str) -> float:
        if not ids:
            raise DataError(f"{ending!r}: has no token before it by which it could be likely; give a prompt with words")
        if not own or len(ids) + len(own) > self.context_length:
            raise DataError(
                f"{ending!r}: has {len(own)} tokens, and the prompt leaves {self.context_length - len(ids)}"
            )
        with torch.no_grad():
            logits = self._ending_logits(ids, own).float()
        chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(own, device=logits.device)[:, None])
        log_prob = float(chosen.sum())
        if not math.isfinite(log_prob):
            raise ModelError(_NOT_FINITE)
        return log_prob

    def _ending_logits(self, ids: Sequence[int], own: Sequence[int]) -> torch.Tensor:
        """What is said before each token of an ending, ``[tokens, vocab]``."""
        device = self._model.device
        if not self._has_encoder:
            logits: torch.Tensor = self._model(torch.tensor([[*ids, *own]], device=device)).logits
            return logits[0, len(ids) - 1 : -1]
        # a decoder begins with a token that is in no text
        begun = [self._model.config.decoder_start_token_id, *own[:-1]]
        rows = {"input_ids": [list(ids)], "decoder_input_ids": [begun]}
        outputs: torch.Tensor = self._model(**{k: torch.tensor(row, device=device) for k, row in rows.items()}).logits
        return outputs[0]

    @cached_property
    def model_digest(self) -> str:
        """Return the SHA-256 in hex over weights and `companions`, which decide every completion."""
        parts = [weights_digest(self._model.named_parameters()), self.companions]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @cached_property
    def companions(self) -> str:
        """Config, tokenizer, ends of texts and chat template as JSON: with others the same weights answer otherwise."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            tokenizer = self._tokenizer.get_vocab()
        else:
            # how the last texts were padded and cut is not the tokenizer's
            tokenizer = {**json.loads(backend.to_str()), "padding": None, "truncation": None}
        template = None if self._template is None else self._template.source
        return json.dumps([self._described, tokenizer, sorted(self.end_tokens), template], sort_keys=True)

    @property
    def template_digest(self) -> str | None:
        """SHA-256 in hex of the chat template; None where there is none."""
        return None if self._template is None else hashlib.sha256(self._template.source.encode()).hexdigest()

    def _check_ids(self, ids: Sequence[int]) -> list[int]:
        if not ids:
            raise DataError("prompt: has no token; give words")
        if len(ids) >= self.context_length:
            raise DataError(
                f"prompt: has {len(ids)} tokens, the model's window is {self.context_length}; shorten it to "
                f"{self.context_length - 1}"
            )
        return list(ids)


class TextStream:
    """The pieces of one text while it is written; leaving the context ends the writing.

    Attributes:
        completion: The whole, once all pieces have come.
    """

    completion: Completion

    def __init__(self, model: Any, tokenizer: Any, ids: Sequence[int], sampling: SamplingRule, window: int) -> None:
        self._model, self._tokenizer, self._ids, self._sampling = model, tokenizer, list(ids), sampling
        self._most = min(sampling.max_new_tokens, window - len(ids))
        self._streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._left = threading.Event()
        self._fault: Exception | None = None
        self._written: list[int] = []
        self._writer = threading.Thread(target=self._write_pieces, name="text-stream", daemon=True)

    def __enter__(self) -> Self:
        self._writer.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._left.set()
        self._writer.join()

    def __iter__(self) -> Iterator[str]:
        """The pieces, in order.

        Raises:
            ModelError: A logit is no finite number, or the model cannot be run.
        """
        pieces = []
        for piece in self._streamer:
            pieces.append(piece)
            yield piece
        self._writer.join()
        if self._fault is not None:
            raise ModelError(f"the model cannot go on: {self._fault}") from self._fault
        ends = _end_tokens(self._model)
        is_over = bool(self._written) and self._written[-1] in ends
        self.completion = Completion(
            text="".join(pieces),
            prompt_tokens=len(self._ids),
            tokens=len(self._written),
            finish="stop" if is_over else "length",
        )

    def _write_pieces(self) -> None:
        prompt = torch.tensor([self._ids], device=self._model.device)
        try:
            stops = StoppingCriteriaList([_stop_when(self._left.is_set)])
            outputs = _run_generate(
                self._model,
                prompt,
                torch.ones_like(prompt),
                self._sampling,
                self._most,
                {"streamer": self._streamer, "stopping_criteria": stops},
            )
            self._written = outputs[0].tolist()
        except (RuntimeError, ValueError, IndexError, ModelError) as exc:
            self._fault = exc
            self._streamer.end()


def _run_generate(
    model: Any,
    ids: torch.Tensor,
    seen: torch.Tensor,
    sampling: SamplingRule,
    most: int,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> torch.Tensor:
    """Return what transformers writes behind rows, or in answer to them; draws of others are left alone."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(sampling.seed)
        outputs: torch.Tensor = model.generate(
            ids,
            attention_mask=seen,
            max_new_tokens=most,
            logits_processor=LogitsProcessorList([_require_finite]),
            pad_token_id=min(_end_tokens(model), default=0),
            **sampling.generate_arguments(),
            **more,
        )
    # a decoder behind an encoder begins with one token of its own
    return outputs[:, 1 if model.config.is_encoder_decoder else ids.shape[1] :]


def _require_finite(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Pass finite logits on; the likeliest of NaN would be token 0."""
    if not bool(torch.isfinite(scores).all()):
        raise ModelError(_NOT_FINITE)
    return scores


def _stop_when(is_asked: Callable[[], bool]) -> Callable[..., torch.Tensor]:
    """The criterion that stops when a function says so; it tells of each row whether it is over, ``[batch]``."""

    def stops(ids: torch.Tensor, _scores: torch.Tensor, **_: object) -> torch.Tensor:
        return torch.full((ids.shape[0],), is_asked(), dtype=torch.bool, device=ids.device)

    return stops


def _end_tokens(model: Any) -> set[int]:
    """Tokens that end a text."""
    ends = model.generation_config.eos_token_id
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
