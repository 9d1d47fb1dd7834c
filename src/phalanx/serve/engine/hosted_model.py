"""A model with its adapters, tokenizer, chat template and grammars, ready for the engine."""

import contextlib
import hashlib
import importlib.util
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from phalanx.errors import DataError, ModelError, PhalanxError
from phalanx.models.adapters.peft_files import WEIGHTS, read_adapter_keys
from phalanx.serve.engine.attention import adopt_attention
from phalanx.serve.engine.grammar import GrammarCompiler
from phalanx.serve.engine.int8 import quantize_model
from phalanx.serve.engine.packed import pack_model
from phalanx.serve.engine.request import BadRequestError, GenerationRequest
from phalanx.serve.engine.row_cache import RowCache
from phalanx.serve.engine.text_assembler import TokenNames
from phalanx.serve.engine.tools import ToolFormat, find_tool_format
from phalanx.serve.text_model import TextModel

Weights = Literal["float", "int8"]


@dataclass(frozen=True)
class ModelCard:
    """A model or adapter that clients may name.

    Attributes:
        digest: `TextModel.model_digest`, and of an adapter over its weights too.
        adapter: Its name inside the model; empty for the bare model.
        base: Id of the model that an adapter stands on.
    """

    id: str
    digest: str
    created: int
    window: int
    adapter: str = ""
    base: str | None = None


@dataclass
class HostedModel:
    """One loaded model with its adapters.

    Args:
        name: Id by which clients name it.
        text_model: Opened by `open_text_model`, on the processor and in one process.
        adapters: Directories in peft's format by the id that clients name.
        weights: ``int8`` computes linear layers in integers; ``float`` takes the numbers of the files.

    Raises:
        ModelError: It has an encoder, a tokenizer without a file of the tokenizers library, or an attention that this
            engine does not compute; or an adapter does not fit.
    """

    name: str
    text_model: TextModel
    created: int
    adapters: Mapping[str, Path] = field(default_factory=lambda: MappingProxyType({}))
    weights: Weights = "float"

    def __post_init__(self) -> None:
        if self.text_model.has_encoder:
            raise ModelError(f"{self.name}: has an encoder, which the server does not run; use phalanx generate")
        if not self.text_model.tokenizer.is_fast:
            raise ModelError(f"{self.name}: has no tokenizer.json; `phalanx model import` makes one")
        adopt_attention(self.module)
        self._peft = self._load_adapters() if self.adapters else None
        self._turn = threading.Lock()
        digest = self.text_model.model_digest
        if self.weights == "int8":
            if self.adapters:
                raise ModelError("adapters: stand on float weights alone; leave --weights int8 or the adapters out")
            quantize_model(self.module)
            digest = digest_with_int8(digest)
        pack_model(self.module)
        window = self.text_model.context_length
        base = ModelCard(self.name, digest, self.created, window)
        self.cards: tuple[ModelCard, ...] = (base, *(self._card_of(name, base) for name in self.adapters))

    def _load_adapters(self) -> Any:
        try:
            import peft  # noqa: PLC0415  -- an extra
        except ImportError as exc:
            raise ModelError("adapters need peft, which is not installed; install phalanx-train[lora]") from exc
        model: Any = None
        for name, directory in self.adapters.items():
            read_adapter_keys(directory, to_merge=True)
            try:
                if model is None:
                    model = peft.PeftModel.from_pretrained(self.module, directory, _slot_name(name))
                else:
                    model.load_adapter(directory, _slot_name(name))
            except (OSError, ValueError, KeyError, RuntimeError) as exc:
                raise ModelError(f"{directory}: does not fit {self.name} ({str(exc)[:300]})") from exc
        return model.eval()

    def _card_of(self, name: str, base: ModelCard) -> ModelCard:
        with (self.adapters[name] / WEIGHTS).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        joined = hashlib.sha256(f"{base.digest}\n{digest}".encode()).hexdigest()
        return ModelCard(name, joined, base.created, base.window, name, base.id)

    def choose_adapter(self, name: str) -> AbstractContextManager[object]:
        """Activate an adapter, or none, inside a context; for the decode loop alone."""
        if self._peft is None:
            return contextlib.nullcontext()
        if not name:
            context: AbstractContextManager[object] = self._peft.disable_adapter()
            return context
        self._peft.set_adapter(_slot_name(name), inference_mode=True)
        return contextlib.nullcontext()

    @property
    def forks_texts(self) -> bool:
        """Whether a text's keys and values can be copied: several choices, and prefixes that are used again."""
        return True

    def find_text_number(self, cache: RowCache) -> int | None:
        """Return the number by which the log speaks of a text apart from its request; None where it does not."""
        return None

    def find_text_fault(self, cache: RowCache) -> PhalanxError | None:
        """Return why a text must not go on; None where it may."""
        return None

    def end_text(self, cache: RowCache) -> None:
        """Release the records of a text at other parties."""

    @property
    def module(self) -> Any:
        """The model that transformers loaded; adapters are put into its layers."""
        return self.text_model.module

    @property
    def backend(self) -> Any:
        """The tokenizer of the tokenizers library."""
        return self.text_model.tokenizer.backend_tokenizer

    @property
    def num_layers(self) -> int:
        """How many layers keep keys and values."""
        return int(self.module.config.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table."""
        return int(self.module.get_input_embeddings().weight.shape[0])

    @cached_property
    def text_ends(self) -> frozenset[int]:
        """Tokens that end a text that goes on from a text."""
        tokenizer_end = self.text_model.tokenizer.eos_token_id
        return self.text_model.end_tokens or (frozenset() if tokenizer_end is None else frozenset({tokenizer_end}))

    @cached_property
    def turn_ends(self) -> frozenset[int]:
        """Tokens that end an assistant's turn: the end of a text, and tokens of the template after a turn."""
        if not self.text_model.has_template:
            return self.text_ends
        try:
            turn_end = self.text_model.end_of_turn()
        except DataError:
            # a template that marks no part as the assistant's
            return self.text_ends
        return self.text_ends if turn_end is None else self.text_ends | {turn_end}

    @cached_property
    def token_names(self) -> TokenNames:
        """Texts and bytes of single tokens."""
        return TokenNames(self.backend)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles grammars over the vocabulary."""
        return GrammarCompiler(self.text_model.tokenizer, self.vocab_size, self.turn_ends)

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the template writes a call of a tool; None where it writes no tools."""
        return find_tool_format(self.text_model)

    def warm_up(self) -> None:
        """Warm up caches for the first requests; with a broken template they fail at the requests themselves."""
        with contextlib.suppress(PhalanxError):
            _ = self.text_ends, self.turn_ends, self.token_names, self.tool_format
            if importlib.util.find_spec("llguidance") is not None:
                self.grammars.prepare_tokenizer()

    def encode_prompt(self, request: GenerationRequest) -> tuple[int, ...]:
        """Return the prompt of a request in tokens.

        Raises:
            BadRequestError: It does not fit, forges a special token, or the template does not render it.
        """
        if request.messages is not None:
            return self._encode_chat(request)
        if request.text is None:
            return self._check_ids(request.ids or ())
        self._check_special(request.text)
        try:
            return tuple(self.text_model.encode_prompt(request.text))
        except DataError as exc:
            raise BadRequestError(str(exc), "prompt") from exc

    def _encode_chat(self, request: GenerationRequest) -> tuple[int, ...]:
        tools = [tool.for_template() for tool in request.tools] if request.tool_choice != "none" else []
        if not self.text_model.has_template:
            message = (
                f"{request.model}: has no chat template and takes no messages; send `prompt` to /v1/completions, or "
                "ask a model that was tuned for chats"
            )
            raise BadRequestError(message, "messages")
        with self._turn:
            if tools and self.tool_format is None:
                raise BadRequestError(f"{request.model}: its chat template writes no tools", "tools")
            try:
                return tuple(self.text_model.chat_prompt(request.messages or (), tools))
            except (DataError, ModelError) as exc:
                raise BadRequestError(str(exc), "messages") from exc

    def _check_special(self, text: str) -> None:
        for token in self.backend.get_added_tokens_decoder().values():
            if token.special and token.content in text:
                raise BadRequestError(f"holds {token.content!r}, a special token; send token ids", "prompt")

    def _check_ids(self, ids: Sequence[int]) -> tuple[int, ...]:
        if not ids:
            raise BadRequestError("has no token", "prompt")
        if max(ids) >= self.vocab_size:
            raise BadRequestError(f"has a token beyond the vocabulary of {self.vocab_size}", "prompt")
        return tuple(ids)


def digest_with_int8(digest: str) -> str:
    """Return the digest of a model whose linear layers compute in 8-bit integers, from the one of its files."""
    return hashlib.sha256(f"{digest}\nint8 by output and row".encode()).hexdigest()


def _slot_name(name: str) -> str:
    # a module's name may hold no dot
    return "adapter_" + hashlib.sha256(name.encode()).hexdigest()[:16]
