"""An engine that works for a prompt which it does not remember, with vLLM's and llama.cpp's fields about its memory."""

import hashlib
import json

from raw_engine import HEAD, JSON, RawEngine

_ROUNDS = 4000


class TimedEngine(RawEngine):
    """Remembers prompts by ``cache_salt``; with ``cache_prompt`` false neither reads nor writes what it remembers."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[object, str]] = set()

    def _find(self, body: bytes) -> bytes:
        value = json.loads(body)
        key = value.get("cache_salt"), value["prompt"]
        if key not in self._seen:
            digest = value["prompt"].encode()
            for _ in range(_ROUNDS):
                digest = hashlib.sha256(digest).digest()
        if value.get("cache_prompt", True):
            self._seen.add(key)
        usage = {"prompt_tokens": 5, "completion_tokens": 1}
        choice = {"index": 0, "text": "x", "finish_reason": "length"}
        return HEAD % JSON + json.dumps({"id": "c", "choices": [choice], "usage": usage}).encode()
