"""Strict, frozen configuration: TOML on disk, one error per mistake, one digest per config."""

from phalanx.config.code_source import KEPT_CODE, is_own
from phalanx.config.digest import canonical_json, digest
from phalanx.config.load import Variants, config_of, dump_toml, load_config, parse_override
from phalanx.config.own_code import (
    OWN_KIND,
    changed_code,
    check_methods,
    code_key,
    lacks,
    open_own_code,
    own_references,
    pin_own_code,
    pinned,
    resolve,
    source_files,
    users_traceback,
)
from phalanx.config.relative_paths import check_relative_paths
from phalanx.config.strict import RefusedKeyError, StrictModel, any_kind, check_name, one_of
from phalanx.config.text import escape_controls, is_plain, printable

__all__ = [
    "KEPT_CODE",
    "OWN_KIND",
    "RefusedKeyError",
    "StrictModel",
    "Variants",
    "any_kind",
    "canonical_json",
    "changed_code",
    "check_methods",
    "check_name",
    "check_relative_paths",
    "code_key",
    "config_of",
    "digest",
    "dump_toml",
    "escape_controls",
    "is_own",
    "is_plain",
    "lacks",
    "load_config",
    "one_of",
    "open_own_code",
    "own_references",
    "parse_override",
    "pin_own_code",
    "pinned",
    "printable",
    "resolve",
    "source_files",
    "users_traceback",
]
