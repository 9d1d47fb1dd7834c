"""A data source of the user's own: ``kind = "file.py:object"``."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from phalanx.config import canonical_json, check_methods, unfit_code_error, users_traceback
from phalanx.config.strict import check_reference
from phalanx.data.sources.source import Document, Source, SourceSettings
from phalanx.errors import DataError, PhalanxError

_EXPECTED = "a data source, with documents(), which yields texts, and fingerprint(), a text that names their content"
_RAISED = "data.sources, {kind}: failed:\n{said}"


class OwnSourceConfig(SourceSettings):
    """A data source of the user's own; what `kind` names is called with the options as keywords."""

    kind: Annotated[str, AfterValidator(check_reference)]
    options: dict[str, Any] = Field(default={})


class OwnSource:
    """What stands between a source of the user's own and the corpus: its documents are looked at, its errors told."""

    def __init__(self, kind: str, make: Callable[..., Any], config: OwnSourceConfig) -> None:
        """Make the source."""
        if not callable(make):
            raise unfit_code_error(kind, f"a {type(make).__name__}", "a class or function that returns a data source")
        self._kind, self._config = kind, config
        self._source: Source = self._call_own_code(lambda: make(**config.options))
        check_methods(kind, self._source, _EXPECTED, ("documents", "fingerprint"))

    def fingerprint(self) -> str:
        """Return a digest of its source code, its options and its stated content."""
        fingerprint = self._call_own_code(self._source.fingerprint)
        if not isinstance(fingerprint, str) or not fingerprint:
            raise unfit_code_error(
                self._kind, f"{fingerprint!r:.80} from fingerprint()", "a text that names the content of its documents"
            )
        decided_by = {"code": self._config.kind, "options": self._config.options, "content": fingerprint}
        return hashlib.sha256(canonical_json(decided_by)).hexdigest()

    def documents(self) -> Iterator[Document]:
        """Yield the documents."""
        documents: Iterator[Any] = self._call_own_code(lambda: iter(self._source.documents()))
        done = object()
        number = 0
        while (item := self._call_own_code(lambda: next(documents, done))) is not done:
            number += 1
            name = f"{self._kind}, document {number}"
            if isinstance(item, Document):
                yield item
            elif isinstance(item, str):
                yield Document(name, item)
            else:
                raise DataError(f"{name}: found a {type(item).__name__}, expected a text or a Document")

    def _call_own_code(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except PhalanxError:
            raise
        except Exception as exc:
            # whatever the user's code raises
            raise DataError(_RAISED.format(kind=self._kind, said=users_traceback(exc))) from exc
