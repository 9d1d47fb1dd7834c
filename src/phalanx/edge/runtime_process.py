"""The helper process that opens an exported model with a runtime which shares no code with ours.

``python -m phalanx.edge.runtime_process gguf FILE`` runs llama.cpp (xllamacpp), ``onnx DIR`` onnxruntime-genai. Both
read files in C++; a fault of theirs ends this process and not the command.
"""

import http.client
import importlib.metadata
import json
import os
import secrets
import socket
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.child import Message, answer_orders, die_with_parent

_FORCED = 1e6
"""Bias that makes one token certain; the runtime reports its probability without the bias."""
_SECONDS_TO_LISTEN = 120.0


class _Runtime(ABC):
    """An opened model; token ids in and out."""

    version: str

    @abstractmethod
    def encode_text(self, text: str, *, is_framed: bool, parses_special: bool) -> list[int]:
        """Return the ids of a text; a framed one begins with the tokens that the file adds."""

    @abstractmethod
    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """Return the text of a chat up to where the assistant begins."""

    @abstractmethod
    def complete_greedily(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return the likeliest tokens, one after another, up to the end of the text."""

    @abstractmethod
    def score_ids(self, ids: Sequence[int], begin: int) -> list[float]:
        """Return the log-probability of each token from a place on, given those before it."""


class _LlamaCpp(_Runtime):
    """llama.cpp's own server, in this process, behind a socket in a directory that only this user can enter."""

    def __init__(self, path: str, num_threads: int) -> None:
        import xllamacpp  # noqa: PLC0415 - an extra

        self.version = f"xllamacpp {importlib.metadata.version('xllamacpp')}"
        self._socket = os.path.join(tempfile.mkdtemp(prefix="phalanx-edge-"), "s.sock")
        self._key = secrets.token_hex(16)
        params = xllamacpp.CommonParams()
        params.model.path = path
        params.hostnames = [self._socket]
        params.api_keys = [self._key]
        params.n_ctx, params.n_parallel = 2048, 1
        params.warmup = params.ui = params.endpoint_slots = params.fit_params = False
        params.n_gpu_layers = 0
        params.verbosity = 0
        params.use_jinja = True
        params.enable_reasoning = 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
        # it would keep several copies of every context
        params.cache_ram_mib = 0
        self._server = xllamacpp.Server(params)
        self._link = _UnixLink(self._socket)

    def encode_text(self, text: str, *, is_framed: bool, parses_special: bool) -> list[int]:
        body = {"content": text, "add_special": is_framed, "parse_special": parses_special}
        return list(self._post("/tokenize", body)["tokens"])

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        return str(self._post("/apply-template", {"messages": list(messages)})["prompt"])

    def complete_greedily(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        body = {"prompt": list(ids), "n_predict": num_tokens, "temperature": 0, "return_tokens": True, "top_k": 1}
        return list(self._post("/completion", body)["tokens"])

    def score_ids(self, ids: Sequence[int], begin: int) -> list[float]:
        return [self._score_next(ids[:place], ids[place]) for place in range(begin, len(ids))]

    def _score_next(self, ids: Sequence[int], token: int) -> float:
        body = {
            "prompt": list(ids),
            "n_predict": 1,
            "n_probs": 1,
            "temperature": 0,
            "logit_bias": [[token, _FORCED]],
            "cache_prompt": True,
        }
        answer = self._post("/completion", body)["completion_probabilities"][0]
        if answer["id"] != token:
            raise ValueError(f"forced token {token} came back as {answer['id']}")
        return float(answer["logprob"])

    def _post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        try:
            self._link.request("POST", route, json.dumps(body), headers)
            response = self._link.getresponse()
        except (BrokenPipeError, ConnectionResetError, http.client.RemoteDisconnected):
            # the server closes a link that nothing came on for some seconds
            self._link.close()
            self._link.request("POST", route, json.dumps(body), headers)
            response = self._link.getresponse()
        content = json.loads(response.read())
        if response.status != http.HTTPStatus.OK:
            raise ValueError(f"{route}: {str(content.get('error', content))[:300]}")
        return dict(content)


class _UnixLink(http.client.HTTPConnection):
    """HTTP over a socket in the file system; opened anew where the server ends it, as it does after 100 requests."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=600)
        self._path = path

    def connect(self) -> None:
        deadline = time.monotonic() + _SECONDS_TO_LISTEN
        while True:
            self.sock = socket.socket(socket.AF_UNIX)
            try:
                self.sock.connect(self._path)
            except (ConnectionRefusedError, FileNotFoundError):
                self.sock.close()
                # the thread of the server may not listen yet on a busy machine
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
            else:
                return


class _OnnxGenai(_Runtime):
    """onnxruntime with the tokenizer, template and cache of onnxruntime-genai."""

    def __init__(self, path: str, num_threads: int) -> None:
        import onnxruntime_genai  # noqa: PLC0415 - an extra

        self._genai = onnxruntime_genai
        self.version = f"onnxruntime-genai {importlib.metadata.version('onnxruntime-genai')}"
        settings = onnxruntime_genai.Config(path)
        settings.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": num_threads}}}}))
        self._model = onnxruntime_genai.Model(settings)
        self._tokenizer = onnxruntime_genai.Tokenizer(self._model)

    def encode_text(self, text: str, *, is_framed: bool, parses_special: bool) -> list[int]:
        self._tokenizer.update_options(add_special_tokens="true" if is_framed else "false")
        return [int(token) for token in self._tokenizer.encode(text)]

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        return str(self._tokenizer.apply_chat_template(json.dumps(list(messages)), add_generation_prompt=True))

    def complete_greedily(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        generator = self._start(ids, num_tokens)
        while not generator.is_done():
            generator.generate_next_token()
        return [int(token) for token in generator.get_sequence(0)][len(ids) :]

    def score_ids(self, ids: Sequence[int], begin: int) -> list[float]:
        logits = np.asarray(self._start(ids, 1).get_output("logits"), dtype=np.float64)[0]
        before = logits[begin - 1 : -1]
        highest = before.max(axis=-1, keepdims=True)
        log_sums = np.log(np.exp(before - highest).sum(axis=-1)) + highest[:, 0]
        chosen = before[np.arange(len(ids) - begin), np.asarray(ids[begin:])]
        return [float(score) for score in chosen - log_sums]

    def _start(self, ids: Sequence[int], num_tokens: int) -> Any:
        rules = self._genai.GeneratorParams(self._model)
        rules.set_search_options(max_length=len(ids) + num_tokens, do_sample=False)
        generator = self._genai.Generator(self._model, rules)
        generator.append_tokens(np.asarray(ids, dtype=np.int32))
        return generator


_RUNTIMES = {"gguf": _LlamaCpp, "onnx": _OnnxGenai}


def _answer_order(runtime: _Runtime, order: dict[str, Any]) -> dict[str, Any]:
    match order["do"]:
        case "version":
            return {"version": runtime.version}
        case "encode":
            framed, special = bool(order["framed"]), bool(order["special"])
            ids = [runtime.encode_text(text, is_framed=framed, parses_special=special) for text in order["texts"]]
            return {"ids": ids}
        case "render":
            return {"text": runtime.render_chat(order["messages"])}
        case "complete":
            return {"ids": runtime.complete_greedily(order["ids"], order["tokens"])}
        case _:
            return {"scores": runtime.score_ids(order["ids"], order["begin"])}


def main(kind: str, path: str, num_threads: int) -> None:
    """Open a model and answer orders until the pipe is closed."""
    die_with_parent()
    opened: list[_Runtime] = []

    def answer(order: dict[str, Any], _content: bytes) -> Iterable[Message]:
        try:
            if not opened:
                # here and not before: what a library prints while it loads is no answer
                opened.append(_RUNTIMES[kind](path, num_threads))
            yield _answer_order(opened[0], order), b""
        except Exception as exc:  # noqa: BLE001 - the runtimes raise whatever their C++ throws
            yield {"error": f"{type(exc).__name__}: {exc}"[:500]}, b""

    answer_orders(answer)
    # a server thread of llama.cpp would be waited for
    for runtime in opened:
        if isinstance(runtime, _LlamaCpp):
            Path(runtime._socket).unlink(missing_ok=True)
            Path(runtime._socket).parent.rmdir()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
