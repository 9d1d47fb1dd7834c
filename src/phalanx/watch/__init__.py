"""Watching a training run from its directory: a page, metrics, traces, alerts, and a card when it went wrong.

What a run writes is the interface: nothing here is asked of a run, and nothing in its directory is written or locked
but the card of a run that has ended.
"""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.watch.config import RunWatchConfig as RunWatchConfig, load_run_watch as load_run_watch
    from phalanx.watch.post_mortem import make_card as make_card, write_card as write_card
    from phalanx.watch.server import WatchPlan as WatchPlan, look_once as look_once, watch_runs as watch_runs


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
