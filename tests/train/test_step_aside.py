"""What is written beside the training is of the lowest priority, and the training keeps its own."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx.train.saving.saver import _lower_priority


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a priority is a process's")
def test_the_writer_steps_aside_and_nobody_else():
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    with ThreadPoolExecutor(1, initializer=_lower_priority) as writer:
        its = writer.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result()

    assert its == 19
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before < 19
