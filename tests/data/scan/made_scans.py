"""Scans as a build makes them of what a recipe says, for tests of scans."""

from phalanx.data.rules import Rule
from phalanx.data.scan import SCANS
from phalanx.data.scan.word_stream import ScanSettings


def make_scan(config: ScanSettings) -> Rule:
    return SCANS[config.kind].make(config)
