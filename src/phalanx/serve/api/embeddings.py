"""POST /v1/embeddings: the mean of a model's last hidden states."""

import base64
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from phalanx.serve.api.completions import Ids
from phalanx.serve.api.fields import CacheFields, ModelId, Text

_MAX_INPUTS = 64


class EmbeddingBody(CacheFields):
    """The body of a request; every other field is refused."""

    model: ModelId
    input: (
        Text
        | Ids
        | Annotated[tuple[Text, ...], Field(min_length=1, max_length=_MAX_INPUTS)]
        | Annotated[tuple[Ids, ...], Field(min_length=1, max_length=_MAX_INPUTS)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: None = None
    user: Annotated[str, Field(max_length=256)] | None = None

    def texts(self) -> list[str | tuple[int, ...]]:
        """Return the texts, or their tokens."""
        if isinstance(self.input, str):
            return [self.input]
        texts: list[str | tuple[int, ...]] = []
        for part in self.input:
            if isinstance(part, int):
                return [tuple(token for token in self.input if isinstance(token, int))]
            texts.append(part)
        return texts

    def describe(self, vectors: Sequence[Sequence[float]], num_tokens: int) -> dict[str, Any]:
        """Return the answer."""
        data = [
            {"object": "embedding", "index": number, "embedding": self._encode(vector)}
            for number, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": data, "model": self.model, "usage": usage}

    def _encode(self, vector: Sequence[float]) -> str | list[float]:
        if self.encoding_format != "base64":
            return list(vector)
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
