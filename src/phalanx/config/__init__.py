"""Strict, frozen configuration: TOML on disk, one error per mistake, one digest per config."""

from phalanx.config.digest import canonical_json, digest
from phalanx.config.load import dump_toml, load_config, parse_override
from phalanx.config.strict import StrictModel

__all__ = ["StrictModel", "canonical_json", "digest", "dump_toml", "load_config", "parse_override"]
