"""Perplexity of served models on texts of the operator, measured by the engine that answers clients."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from phalanx.errors import InputError, ModelError, PhalanxError
from phalanx.security.crypto import digest_hex
from phalanx.serve.engine import EnginePool, GenerationRequest, ModelCard, PromptRead
from phalanx.serve.engine.jobs import collect_events

_MAX_TEXTS, _MAX_FILE_BYTES = 1000, 4 * 1024 * 1024
_MAX_MEAN = 709.0
_OWNER = "reference texts of the operator"
_log = logging.getLogger(__name__)


def read_texts(path: Path) -> tuple[list[str], str]:
    """Read a file with one text a line; return the texts and the file's digest.

    Raises:
        InputError: It cannot be read, is too large, or has no text.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        # lines of bytes: a text may hold characters that end lines of strings
        texts = [row.decode("utf-8") for row in data.splitlines() if row.strip()]
    except (OSError, UnicodeDecodeError) as exc:
        raise InputError(f"{path}: cannot be read as text, one a line") from exc
    if not texts or len(texts) > _MAX_TEXTS or len(data) > _MAX_FILE_BYTES:
        raise InputError(f"{path}: expected 1 to {_MAX_TEXTS} lines and at most {_MAX_FILE_BYTES} bytes")
    return texts, digest_hex(data)


async def measure_models(pool: EnginePool, texts: Sequence[str]) -> dict[str, float]:
    """Return the perplexity of each model and adapter; one whose engine is busy is left out."""
    perplexities = {}
    for card in pool.cards:
        try:
            perplexities[card.id] = await _measure_model(pool, card, texts)
        except PhalanxError as exc:
            _log.warning("the perplexity of %s was not measured: %s", card.id, exc)
    return perplexities


async def _measure_model(pool: EnginePool, card: ModelCard, texts: Sequence[str]) -> float:
    total, count = 0.0, 0
    for text in texts:
        request = GenerationRequest(
            model=card.id,
            owner=_OWNER,
            text=text,
            echo=True,
            logprobs=0,
            max_tokens=0,
        )
        prompt = (await pool.encode_prompt(request))[: card.window - 1]
        if len(prompt) < 2:
            continue
        for event in await collect_events(await pool.open_events(request, prompt)):
            if isinstance(event, PromptRead):
                scores = [score.logprob for score in event.scores if score is not None]
                total, count = total - sum(scores), count + len(scores)
    if not count:
        raise ModelError("the reference texts have no two tokens")
    # of a model that is out of order, the mean can be beyond what has an exponential
    return math.exp(min(total / count, _MAX_MEAN))
