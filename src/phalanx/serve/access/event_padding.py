"""Streams whose events have one length: who sees an encrypted stream reads no lengths of tokens from it."""

_STEP = 64
_MAX_LENGTH = 4096
_FIELD = ', "obfuscation": ""'
_END = "}\n\n"


class EventPadder:
    """Makes each event of one stream as long as its longest one so far, by a field that clients pass over.

    Attacker: somebody on the way who records lengths of TLS records; lengths of tokens in their order tell the topic,
    and parts of the text (Whisper Leak, arXiv 2511.03675). Times and the number of events stay to be seen.
    """

    def __init__(self) -> None:
        self._length = 0

    def pad_event(self, event: str) -> str:
        """Return an event of JSON with the field ``obfuscation``; others, and those beyond 4 kB, as they are."""
        bare = len(event) + len(_FIELD)
        if not event.endswith(_END) or bare > _MAX_LENGTH:
            return event
        self._length = max(self._length, -(-bare // _STEP) * _STEP)
        return f'{event[: -len(_END)]}{_FIELD[:-1]}{"x" * (self._length - bare)}"{_END}'


def wants_padding(wish: bool | None, scheme: str) -> bool:
    """Whether a stream is padded: as its request says, and otherwise where it is encrypted."""
    return scheme == "https" if wish is None else wish
