"""Strict, frozen configuration: TOML on disk, one error per mistake, one digest per config."""

from phalanx.config.digest import canonical_json, digest
from phalanx.config.load import dump_toml, load_config, parse_config, parse_override
from phalanx.config.strict import StrictModel, one_of
from phalanx.config.text import MOST_CHARACTERS, is_plain, printable

__all__ = [
    "MOST_CHARACTERS",
    "StrictModel",
    "canonical_json",
    "digest",
    "dump_toml",
    "is_plain",
    "load_config",
    "one_of",
    "parse_config",
    "parse_override",
    "printable",
]
