"""The pause of garbage collection while many objects are created."""

from __future__ import annotations

import gc
import threading

from torchmn.context import collections_paused


def test_collection_is_paused_until_the_last_thread_leaves():
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with collections_paused():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(60) and not gc.isenabled()
    with collections_paused(), collections_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_collection_that_the_user_has_switched_off_stays_off():
    gc.disable()
    try:
        with collections_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
