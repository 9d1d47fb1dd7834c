"""One question to a language model behind an OpenAI-compatible server."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from pydantic import Field

from phalanx.config import StrictModel
from phalanx.errors import ConfigError, RewardError

_MOST_REPLY_BYTES = 1 << 20


class ServerSettings(StrictModel):
    """Address and name of a served language model.

    Attributes:
        url: Address of the server, up to ``/v1``.
        key_file: A file with the key, for a server that wants one.
    """

    url: str = Field(pattern=r"^https?://[^\s]+$", max_length=1000)
    model: str = Field(min_length=1, max_length=200)
    key_file: Path | None = None


class ServedModel:
    """A model that a server runs.

    Args:
        timeout_s: Time limit of one answer; None where the caller limits it.

    Raises:
        ConfigError: The key cannot be read.
    """

    def __init__(self, where: ServerSettings, timeout_s: float | None = None) -> None:
        self._where, self._timeout_s = where, timeout_s
        self._headers = {"content-type": "application/json"}
        if where.key_file is not None:
            try:
                key = where.key_file.read_text(encoding="utf-8").strip()
            except OSError as exc:
                raise ConfigError(f"{where.key_file}: the judge's key cannot be read ({exc.strerror})") from exc
            self._headers["authorization"] = f"Bearer {key}"
        # no proxy of the environment, no redirection to elsewhere
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())

    def ask_question(self, question: str) -> str:
        """Return the model's answer, at temperature 0.

        Raises:
            RewardError: The server is not reached, takes too long, or gives no answer of the kind that is expected.
        """
        server = self._where
        asked = {"model": server.model, "temperature": 0, "messages": [{"role": "user", "content": question}]}
        request = urllib.request.Request(  # noqa: S310 - the config takes http and https alone
            f"{server.url.rstrip('/')}/chat/completions", json.dumps(asked).encode(), self._headers
        )
        try:
            with self._opener.open(request, timeout=self._timeout_s) as reply:
                content = json.loads(reply.read(_MOST_REPLY_BYTES))["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as exc:
            exc.close()
            raise RewardError(f"{server.url}: gives no answer that can be read (HTTP {exc.code})") from exc
        except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError) as exc:
            raise RewardError(f"{server.url}: gives no answer that can be read ({type(exc).__name__}: {exc})") from exc
        return content if isinstance(content, str) else ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirection is an answer of the wrong kind."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow nothing."""
        return
