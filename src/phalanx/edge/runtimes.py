"""Two readers of one model that are asked the same: ours in this process, an independent one in a helper process."""

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from phalanx.child import AskedProcess
from phalanx.data.borders import bare_encoder
from phalanx.data.chat import ChatMessage, model_template
from phalanx.errors import ModelError
from phalanx.serve.sampling import SamplingRule
from phalanx.serve.text_model import TextModel

RUNTIME_PACKAGES = {"gguf": "xllamacpp", "onnx": "onnxruntime-genai"}
"""The independent runtime of each format; the extra of the format installs it."""
_TIMEOUT_S = 1800.0


class EdgeRuntime(Protocol):
    """What a table of differences asks of a model."""

    def encode_texts(self, texts: Sequence[str], *, framed: bool, special: bool) -> list[list[int]]:
        """Return the ids of texts.

        Args:
            framed: Whether to add the tokens that are written before and behind a text.
            special: Whether a special token that is spelled out in a text becomes that token.
        """

    def render_messages(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the text of a chat up to where the assistant begins."""

    def complete_ids(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return the likeliest tokens one after another, up to the end of the text."""

    def score_tokens(self, ids: Sequence[int], begin: int) -> list[float]:
        """Return the log-probability of each token from `begin` on, given those before it."""


class IndependentRuntime:
    """llama.cpp or onnxruntime on an exported model, in a process of its own.

    Args:
        kind: Format, a key of `RUNTIME_PACKAGES`.
    """

    def __init__(self, kind: str, path: Path) -> None:
        command = ["phalanx.edge.runtime_process", kind, str(path.resolve()), str(torch.get_num_threads())]
        self._path = path
        self._process = AskedProcess(command, {"HF_HUB_OFFLINE": "1"})
        self.version = str(self._ask({"do": "version"})["version"])

    def encode_texts(self, texts: Sequence[str], *, framed: bool, special: bool) -> list[list[int]]:
        """Return the ids of texts."""
        order = {"do": "encode", "texts": list(texts), "framed": framed, "special": special}
        return [[int(token) for token in ids] for ids in self._ask(order)["ids"]]

    def render_messages(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the text of a chat up to where the assistant begins."""
        return str(self._ask({"do": "render", "messages": [dict(message) for message in messages]})["text"])

    def complete_ids(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return the likeliest tokens one after another, up to the end of the text."""
        return [int(token) for token in self._ask({"do": "complete", "ids": list(ids), "tokens": num_tokens})["ids"]]

    def score_tokens(self, ids: Sequence[int], begin: int) -> list[float]:
        """Return the log-probability of each token from `begin` on."""
        return [float(score) for score in self._ask({"do": "score", "ids": list(ids), "begin": begin})["scores"]]

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        try:
            answer, _ = self._process.ask(order, timeout_s=_TIMEOUT_S)
        except (EOFError, TimeoutError) as exc:
            raise ModelError(f"{self._path}: its runtime ended: {exc}") from exc
        if "error" in answer:
            self.close()
            raise ModelError(
                f"{self._path}: the runtime that checks it, asked to {order['do']}, says: {answer['error']}"
            )
        return answer


class OwnRuntime:
    """The model that is exported, as transformers computes it in float32."""

    def __init__(self, directory: Path) -> None:
        self.model = TextModel(directory)
        self.model.module.float()
        backend = self.model.tokenizer.backend_tokenizer
        self._whole = backend
        self._bare = {special: bare_encoder(backend, special_is_text=not special) for special in (False, True)}
        self.has_template = model_template(directory) is not None
        self.version = f"transformers {importlib.metadata.version('transformers')}"

    def encode_texts(self, texts: Sequence[str], *, framed: bool, special: bool) -> list[list[int]]:
        """Return the ids of texts."""
        if framed:
            return [list(self._whole.encode(text).ids) for text in texts]
        encodings = self._bare[special].encode_batch(list(texts), add_special_tokens=False)
        return [list(encoding.ids) for encoding in encodings]

    def render_messages(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the text of a chat up to where the assistant begins."""
        return self.model.render_prompt([ChatMessage(**dict(message)) for message in messages])  # type: ignore[arg-type]

    def complete_ids(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return the likeliest tokens one after another, up to the end of the text."""
        rule = SamplingRule(max_new_tokens=num_tokens, temperature=0.0).generate_arguments()
        prompt = torch.tensor([list(ids)])
        with torch.no_grad():
            output = self.model.module.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_tokens, **rule
            )
        return [int(token) for token in output[0, len(ids) :]]

    def score_tokens(self, ids: Sequence[int], begin: int) -> list[float]:
        """Return the log-probability of each token from `begin` on."""
        return self._log_probs(ids, begin).gather(1, torch.tensor(ids[begin:])[:, None])[:, 0].tolist()

    def regret_tokens(self, ids: Sequence[int], begin: int) -> list[float]:
        """Return how much likelier than each token from `begin` on the likeliest one was, in nats."""
        log_probs = self._log_probs(ids, begin)
        chosen = log_probs.gather(1, torch.tensor(ids[begin:])[:, None])[:, 0]
        return (log_probs.amax(dim=1) - chosen).tolist()

    def _log_probs(self, ids: Sequence[int], begin: int) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.model.module(torch.tensor([list(ids)])).logits[0, begin - 1 : -1]
        return torch.log_softmax(logits.double(), -1)
