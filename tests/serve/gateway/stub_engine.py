"""An engine that speaks the routes of vLLM, open to everybody, and keeps what it was sent.

What it answers is in the last text of the prompt: ``say TEXT``, or one of the words in `Stub.answer`.
"""

import asyncio
import json
import threading

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from phalanx.serve.access import ListenConfig, bind_socket

_OPEN = """
/invocations /pooling /classify /score /v1/score /rerank /v1/rerank /v2/rerank /tokenize /detokenize /load /version
/metrics /ping /sleep /wake_up /is_sleeping /collective_rpc /scale_elastic_ep /is_scaling_elastic_ep /server_info
/reset_prefix_cache /reset_mm_cache /start_profile /stop_profile /v1/load_lora_adapter /v1/unload_lora_adapter
/v1/audio/transcriptions /inference/v1/generate /abort_requests /update_weights /docs /openapi.json
/slots /props /completion /infill /apply-template /lora-adapters /generate /flush_cache /get_server_info
"""
OPEN_ROUTES = tuple(_OPEN.split())
ORIGIN = {"model_digest": "ab" * 32, "marked": ["gumbel"], "secret_of_the_engine": 1}
FALSE_USAGE = {
    "wrong usage": {"prompt_tokens": -5, "completion_tokens": True},
    "too much usage": {"prompt_tokens": 10**9, "completion_tokens": 10**9},
}
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 1}}


def last_text(body: dict) -> str:
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, list) and isinstance(messages[-1], dict):
        content = messages[-1].get("content") or messages[-1].get("output")
        return content if isinstance(content, str) else content[-1]["text"]
    prompt = body.get("prompt", body.get("input"))
    return prompt if isinstance(prompt, str) else str(prompt[-1])


class Stub:
    """Runs in a thread of the test; `requests` and `hits` are what reached it."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict, dict]] = []
        self.hits: list[str] = []
        self.status = 200
        self.left = threading.Event()
        self.may_answer = threading.Event()
        self.health = 200
        routes = [Route(path, self.hit, methods=["GET", "POST", "PUT", "DELETE"]) for path in OPEN_ROUTES]
        routes += [
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.answer, methods=["POST"]),
            Route("/v1/completions", self.answer, methods=["POST"]),
            Route("/v1/embeddings", self.embed, methods=["POST"]),
            Route("/v1/messages", self.answer_messages, methods=["POST"]),
            Route("/v1/responses", self.answer_responses, methods=["POST"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), host="127.0.0.1", port=0, log_level="error", lifespan="off")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def __enter__(self):
        sock = bind_socket(ListenConfig(port=0))
        sock.listen(2048)
        self.port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [sock]}, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(30)

    async def hit(self, request):
        self.hits.append(request.url.path)
        return PlainTextResponse("open")

    async def models(self, request):
        return JSONResponse({"object": "list", "data": []}, self.health)

    async def read(self, request) -> tuple[dict, str]:
        body = json.loads(await request.body())
        self.requests.append((request.url.path, body, dict(request.headers)))
        if last_text(body) == "later":
            await asyncio.to_thread(self.may_answer.wait)
        return body, last_text(body)

    async def embed(self, request):
        await self.read(request)
        data = [{"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}]
        return JSONResponse({"object": "list", "data": data, "model": "inner", "usage": {"prompt_tokens": 4}})

    async def answer(self, request):
        body, text = await self.read(request)
        if self.status != 200:
            return JSONResponse({"error": {"message": "Traceback /srv/secret/path", "code": "x"}}, self.status)
        if text == "too long":
            error = {"message": "8193 tokens in /srv/model", "code": "context_length_exceeded"}
            return JSONResponse({"error": error}, 400)
        if text == "not json":
            return PlainTextResponse("<html>")
        if body.get("stream"):
            return StreamingResponse(self.stream(body, text), media_type="text/event-stream")
        is_chat = "messages" in body
        said = text.removeprefix("say ")
        choices = []
        for index in range(body.get("n", 1)):
            part = {"message": {"role": "assistant", "content": said, "token_ids": [1]}} if is_chat else {"text": said}
            if body.get("tools"):
                function = {"name": "look_up", "arguments": '{"place": "Oslo"}'}
                call = {"id": "call_1", "type": "function", "function": function}
                part = {"message": {"role": "assistant", "content": None, "tool_calls": [call]}}
            if body.get("logprobs"):
                part["logprobs"] = {"content": [{"token": said, "logprob": -0.1, "bytes": None, "top_logprobs": []}]}
                if not is_chat:
                    part["logprobs"] = {
                        "tokens": [said],
                        "token_logprobs": [-0.1],
                        "top_logprobs": None,
                        "text_offset": [0],
                    }
            choices.append({"index": index, "finish_reason": "stop", "stop_reason": None, **part})
        answer = {
            "id": "cmpl-1",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": 1,
            "model": body["model"],
            "choices": choices,
            "usage": USAGE,
            "kv_transfer_params": {"host": "10.0.0.5"},
            "prompt_token_ids": [1, 2],
        }
        if text == "marked":
            answer["phalanx"] = ORIGIN
        if text in FALSE_USAGE:
            answer["usage"] = FALSE_USAGE[text]
        if text == "no usage":
            del answer["usage"]
        return JSONResponse(answer)

    async def stream(self, body: dict, text: str):  # noqa: C901
        is_chat = "messages" in body

        def chunk(choices, **more) -> str:
            kind = "chat.completion.chunk" if is_chat else "text_completion"
            answer = {"id": "c", "object": kind, "created": 1, "model": body["model"], "choices": choices, **more}
            return f"data: {json.dumps(answer)}\n\n"

        def piece(said: str) -> str:
            return chunk(
                [{"index": 0, "finish_reason": None, **({"delta": {"content": said}} if is_chat else {"text": said})}]
            )

        if is_chat:
            yield chunk([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        try:
            if text == "forever":
                number = 0
                while True:
                    yield piece(f"word {number} ")
                    number += 1
                    await asyncio.sleep(0.002)
            if text == "wait":
                yield piece("first ")
                await asyncio.Event().wait()
            if text == "flood":
                while True:
                    yield piece("x " * 50_000)
                    await asyncio.sleep(0)
            if text == "long line":
                while True:
                    yield "data: " + "x" * 100_000
                    await asyncio.sleep(0)
            if text == "break":
                yield piece("so far ")
                return
            if text == "error inside":
                yield 'data: {"error": {"message": "CUDA out of memory at /srv/x", "code": 500}}\n\n'
                return
            if body.get("tools"):
                call = {
                    "index": 0,
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "look_up", "arguments": ""},
                }
                yield chunk([{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}])
                for part in ('{"pla', 'ce": "Os', 'lo"}'):
                    delta = {"tool_calls": [{"index": 0, "function": {"arguments": part}}]}
                    yield chunk([{"index": 0, "delta": delta, "finish_reason": None}])
            else:
                for letter in text.removeprefix("say "):
                    yield piece(letter)
            last = {"delta": {}} if is_chat else {"text": ""}
            more = {"phalanx": ORIGIN} if text == "marked" else {}
            yield chunk([{"index": 0, "finish_reason": "stop", **last}], **more)
            if body.get("stream_options", {}).get("include_usage") and text != "no usage":
                yield chunk([], usage=USAGE)
            yield "data: [DONE]\n\n"
        finally:
            self.left.set()

    async def answer_responses(self, request):
        body, text = await self.read(request)
        said = text.removeprefix("say ")
        part = {
            "type": "output_text",
            "text": said,
            "annotations": [{"type": "url_citation", "url": "http://10.0.0.5"}],
        }
        items = [{"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}]
        if body.get("tools"):
            call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "status": "completed"}
            items = [{**call, "name": "look_up", "arguments": '{"place": "Oslo"}'}]
        usage = {
            "input_tokens": 7,
            "output_tokens": 3,
            "total_tokens": 10,
            "input_tokens_details": {"cached_tokens": 1},
        }
        answer = {"id": "resp_1", "object": "response", "created_at": 1, "status": "completed", "model": body["model"]}
        return JSONResponse({**answer, "error": None, "output": items, "usage": usage, "store": True})

    async def answer_messages(self, request):
        body, text = await self.read(request)
        said = text.removeprefix("say ")
        usage = {"input_tokens": 1, "cache_read_input_tokens": 6, "output_tokens": 3}
        message = {"id": "m", "type": "message", "role": "assistant", "model": body["model"], "stop_sequence": None}
        if not body.get("stream"):
            content = [{"type": "text", "text": said}]
            return JSONResponse({**message, "content": content, "stop_reason": "end_turn", "usage": usage})

        async def events():
            start = {**message, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
            parts = [{"type": "message_start", "message": start}]
            parts.append({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
            for letter in said:
                delta = {"type": "text_delta", "text": letter}
                parts.append({"type": "content_block_delta", "index": 0, "delta": delta})
            parts.append({"type": "content_block_stop", "index": 0})
            delta = {"stop_reason": "end_turn", "stop_sequence": None}
            parts.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": 3}})
            parts.append({"type": "message_stop"})
            for part in parts:
                yield f"event: {part['type']}\ndata: {json.dumps(part)}\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")
