"""The part of CBOR that attestation uses, read so that no two readers could understand it differently.

Source: RFC 8949; output is in its core deterministic form (section 4.2.1).
"""

from typing import Any

from phalanx.security.tee.formats.reader import ByteReader, malformed_error

MAX_DEPTH = 8
MAX_ITEMS = 256
_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY, _MAP, _TAG, _SIMPLE = range(8)
_CONSTANTS = {20: False, 21: True, 22: None}
_INDEFINITE = 31
_BREAK = object()
_SIGN1 = 18


def decode_cbor(data: bytes, where: str) -> Any:
    """Read exactly one item: integers, bytes, text, arrays, maps, booleans, null, and tag 18 around the whole.

    Maps have keys that are integers or text, none of them twice. Arrays and maps of indefinite length are
    read; floats, other tags, undefined and texts in chunks are refused.
    """
    reader = ByteReader(data, where, big_endian=True)
    if data[:1] == tag_sign1(b""):
        reader.take_bytes(1)
    value = _read_item(reader, where, MAX_DEPTH)
    if value is _BREAK:
        raise malformed_error(where, "CBOR ends a sequence that has not begun")
    reader.check_end()
    return value


def encode_cbor(value: Any) -> bytes:
    """Write one item in deterministic CBOR: shortest lengths, maps by the order of their encoded keys."""
    match value:
        case bool() | None:
            return bytes([_SIMPLE << 5 | {False: 20, True: 21, None: 22}[value]])
        case int():
            return _write_head(_UNSIGNED, value) if value >= 0 else _write_head(_NEGATIVE, -1 - value)
        case bytes():
            return _write_head(_BYTES, len(value)) + value
        case str():
            raw = value.encode("utf-8")
            return _write_head(_TEXT, len(raw)) + raw
        case list() | tuple():
            return _write_head(_ARRAY, len(value)) + b"".join(encode_cbor(item) for item in value)
        case dict():
            pairs = sorted((encode_cbor(key), encode_cbor(item)) for key, item in value.items())
            return _write_head(_MAP, len(pairs)) + b"".join(key + pair_value for key, pair_value in pairs)
        case _:
            raise TypeError(f"CBOR: {type(value).__name__} has no encoding here")


def tag_sign1(item: bytes) -> bytes:
    """Return an encoded item with the tag of a COSE_Sign1 before it."""
    return bytes([_TAG << 5 | _SIGN1]) + item


def _read_item(reader: ByteReader, where: str, depth: int) -> Any:
    if depth == 0:
        raise malformed_error(where, f"CBOR is nested deeper than {MAX_DEPTH}")
    first = reader.read_unsigned(1)
    kind, info = first >> 5, first & 0x1F
    if first == _SIMPLE << 5 | _INDEFINITE:
        return _BREAK
    if kind == _SIMPLE:
        if info not in _CONSTANTS:
            raise malformed_error(where, f"CBOR simple value or float {info}")
        return _CONSTANTS[info]
    if kind in (_ARRAY, _MAP):
        count = None if info == _INDEFINITE else _read_argument(reader, info, where)
        return (
            _read_sequence(reader, where, depth, count)
            if kind == _ARRAY
            else _read_mapping(reader, where, depth, count)
        )
    return _read_scalar(reader, where, kind, _read_argument(reader, info, where))


def _read_scalar(reader: ByteReader, where: str, kind: int, argument: int) -> int | bytes | str:
    match kind:
        case 0:
            return argument
        case 1:
            return -1 - argument
        case 2:
            return reader.take_bytes(argument)
        case 3:
            try:
                return reader.take_bytes(argument).decode("utf-8")
            except UnicodeDecodeError as exc:
                raise malformed_error(where, "CBOR text is not UTF-8") from exc
        case _:
            raise malformed_error(where, f"CBOR tag {argument}")


def _read_argument(reader: ByteReader, info: int, where: str) -> int:
    if info < 24:
        return info
    if info > 27:
        raise malformed_error(where, f"CBOR length of form {info}")
    size = 1 << (info - 24)
    value = reader.read_unsigned(size)
    if value < 24 or (size > 1 and value < 1 << (4 * size)):
        raise malformed_error(where, "CBOR number is longer than it must be")
    return value


def _read_sequence(reader: ByteReader, where: str, depth: int, count: int | None) -> list[Any]:
    items: list[Any] = []
    while count is None or len(items) < count:
        if len(items) > MAX_ITEMS:
            raise malformed_error(where, f"CBOR array of more than {MAX_ITEMS}")
        value = _read_item(reader, where, depth - 1)
        if value is _BREAK:
            if count is None:
                break
            raise malformed_error(where, "CBOR array ends too early")
        items.append(value)
    return items


def _read_mapping(reader: ByteReader, where: str, depth: int, count: int | None) -> dict[int | str, Any]:
    entries: dict[int | str, Any] = {}
    while count is None or len(entries) < count:
        key = _read_item(reader, where, depth - 1)
        if key is _BREAK and count is None:
            break
        # True is an int to Python and would stand for 1
        if isinstance(key, bool) or not isinstance(key, int | str) or key in entries or len(entries) >= MAX_ITEMS:
            raise malformed_error(where, "CBOR map with a key twice, of another type than integer or text, or too many")
        value = _read_item(reader, where, depth - 1)
        if value is _BREAK:
            raise malformed_error(where, "CBOR map ends after a key")
        entries[key] = value
    return entries


def _write_head(kind: int, argument: int) -> bytes:
    if argument < 24:
        return bytes([kind << 5 | argument])
    size = next(size for size in (1, 2, 4, 8) if argument < 1 << (8 * size))
    return bytes([kind << 5 | 23 + size.bit_length()]) + argument.to_bytes(size, "big")
