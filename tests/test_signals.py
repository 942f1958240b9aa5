from __future__ import annotations

import queue
import signal
import threading

import pytest

from jrl.run import signals
from jrl.run.signals import StopRequest, leave_on_second_interrupt, stop_on_signals, stopping

CTRL_C = "Stopping: ending this step and saving. Press Ctrl-C again to leave now without saving."


def test_the_message_fits_the_signal():
    assert stopping(signal.SIGINT) == CTRL_C
    assert stopping(signal.SIGTERM) == CTRL_C.replace(" again", "")


def test_a_stop_request_speaks_through_the_display_while_it_is_open(capfd):
    stop, shown = StopRequest(), []
    stop.say("before")
    with stop.routed_to(shown.append):
        stop.say("inside")
    stop.say("after")
    assert shown == ["inside"]
    assert capfd.readouterr().err == "\njrl: before\n\njrl: after\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_watcher_says_what_the_stop_request_was_given(number, capfd):
    stop, shown = StopRequest(), queue.SimpleQueue()
    with stop_on_signals(stop), leave_on_second_interrupt(stop.say), stop.routed_to(shown.put):
        signal.raise_signal(number)
        assert shown.get(timeout=30) == stopping(number) and stop.is_set()
    assert shown.empty() and capfd.readouterr().err == ""


def test_without_a_watcher_the_handler_says_it_once_and_from_another_thread():
    stop, shown = threading.Event(), queue.SimpleQueue()
    with stop_on_signals(stop, lambda text: shown.put((text, threading.current_thread()))):
        signal.raise_signal(signal.SIGINT)
        text, thread = shown.get(timeout=30)
        assert text == CTRL_C and thread is not threading.main_thread()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert shown.empty()


@pytest.mark.parametrize("first", [0, 1])
def test_two_runs_are_both_asked_and_give_the_signals_back_whichever_ends_first(first):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    stops = [threading.Event(), threading.Event()]
    blocks = [stop_on_signals(stop) for stop in stops]
    for block in blocks:
        block.__enter__()
    signal.raise_signal(signal.SIGTERM)
    assert all(stop.is_set() for stop in stops)
    stops[1 - first].clear()
    blocks[first].__exit__(None, None, None)
    signal.raise_signal(signal.SIGINT)
    assert stops[1 - first].is_set()
    blocks[1 - first].__exit__(None, None, None)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def begin_and_close_in_another_thread():
    block = stop_on_signals(threading.Event())
    block.__enter__()
    closing = threading.Thread(target=block.__exit__, args=(None, None, None))
    closing.start()
    closing.join()


def test_a_run_that_another_thread_closes_leaves_signals_as_they_were():
    seen, before = [], signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        begin_and_close_in_another_thread()
        signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
        with stop_on_signals(threading.Event()):
            pass
        signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_set_after_another_thread_closed_a_run_does_not_keep_the_next_run_from_hearing():
    seen, before = [], signal.getsignal(signal.SIGTERM)
    try:
        begin_and_close_in_another_thread()
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
        stop = threading.Event()
        with stop_on_signals(stop):
            signal.raise_signal(signal.SIGTERM)
        assert stop.is_set() and not seen
        signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_interruption_right_after_a_handler_was_installed_gives_it_back(monkeypatch):
    before, install, installed = signal.getsignal(signal.SIGTERM), signal.signal, []

    def interrupted_once(*given):
        install(*given)
        installed.append(given)
        if len(installed) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(signal, "signal", interrupted_once)
    try:
        with pytest.raises(KeyboardInterrupt), stop_on_signals(threading.Event()):
            pass
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        install(signal.SIGTERM, before)


def test_a_run_that_cannot_hear_signals_leaves_no_trace(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt), stop_on_signals(threading.Event()):
            pass
    assert signals._open_blocks == []


def test_signals_that_stop_nothing_are_not_announced(capfd):
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        with leave_on_second_interrupt():
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert capfd.readouterr().err == ""
