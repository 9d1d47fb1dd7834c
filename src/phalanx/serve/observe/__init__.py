"""Watching a server: metrics, traces of requests, alerts, and a board for them."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.serve.observe.config import WatchConfig as WatchConfig, load_watch_config as load_watch_config
    from phalanx.serve.observe.metrics import Gauge as Gauge
    from phalanx.serve.observe.reference import measure_models as measure_models, read_texts as read_texts
    from phalanx.serve.observe.watch import ServerWatch as ServerWatch, WatchedServer as WatchedServer


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
