"""One question to a language model behind an OpenAI-compatible server."""

import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from phalanx.config import StrictModel
from phalanx.errors import ConfigError, RewardError

_MAX_REPLY_BYTES = 1 << 20
_KEY = re.compile("[ -~]+")


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
    """

    def __init__(self, where: ServerSettings, timeout_s: float | None = None) -> None:
        self._where, self._timeout_s = where, timeout_s
        self._headers = {"content-type": "application/json"}
        if where.key_file is not None:
            try:
                key = where.key_file.read_text(encoding="latin-1").strip()
            except OSError as exc:
                raise ConfigError(f"{where.key_file}: the key of a server cannot be read ({exc.strerror})") from exc
            if not _KEY.fullmatch(key):
                # a header that cannot be sent would be quoted in messages
                raise ConfigError(f"{where.key_file}: holds no key; expected one line of printable ASCII alone")
            self._headers["authorization"] = f"Bearer {key}"
        # no proxy of the environment, no redirection to elsewhere
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())

    def ask_question(self, question: str) -> str:
        """Return the model's answer, at temperature 0.

        Raises:
            RewardError: The server is not reached, takes too long, or gives no answer of the kind that is expected.
        """
        messages = [{"role": "user", "content": question}]
        body = self.post_json("chat/completions", {"temperature": 0, "messages": messages})
        try:
            content = body["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as exc:
            raise self._unreadable_error(exc) from exc
        return content if isinstance(content, str) else ""

    def post_json(self, route: str, asked: Mapping[str, Any], max_bytes: int = _MAX_REPLY_BYTES) -> Any:
        """Return the answer of a route below ``/v1`` to a JSON object, to which the model's name is added."""
        request = urllib.request.Request(  # noqa: S310 - the config takes http and https alone
            f"{self._where.url.rstrip('/')}/{route}",
            json.dumps({"model": self._where.model, **asked}).encode(),
            self._headers,
        )
        try:
            with self._opener.open(request, timeout=self._timeout_s) as reply:
                return json.loads(reply.read(max_bytes))
        except urllib.error.HTTPError as exc:
            exc.close()
            raise RewardError(f"{self._where.url}: gives no answer that can be read (HTTP {exc.code})") from exc
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as exc:
            raise self._unreadable_error(exc) from exc

    def _unreadable_error(self, exc: Exception) -> RewardError:
        return RewardError(f"{self._where.url}: gives no answer that can be read ({type(exc).__name__}: {exc})")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirection is an answer of the wrong kind."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow nothing."""
        return
