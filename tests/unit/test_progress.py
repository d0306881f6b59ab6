"""Bars of a rank that reads or writes: seen on a terminal alone, with speed and time left."""

from __future__ import annotations

import threading

from composer_fsdp2.progress import counting_bytes
from tests.support.screen import show_on


def count(total: int = 1000) -> None:
    with counting_bytes("Loading ep1", total) as advance:
        for _ in range(4):
            advance(total // 4)


def test_a_terminal_has_speed_and_time_left(monkeypatch):
    shown = show_on(monkeypatch, True)
    count()
    assert "Loading ep1" in shown.getvalue()
    assert "B/s" in shown.getvalue()


def test_a_file_has_nothing(monkeypatch):
    shown = show_on(monkeypatch, False)
    count()
    assert shown.getvalue() == ""


def test_a_thread_in_the_background_has_nothing(monkeypatch):
    shown = show_on(monkeypatch, True)
    thread = threading.Thread(target=count)
    thread.start()
    thread.join()
    assert shown.getvalue() == ""
