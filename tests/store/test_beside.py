"""Work done beside: its result, its failure, and again after an end."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from tensorprobe.store.beside import Beside


def test_it_runs_in_another_thread_until_it_is_stopped() -> None:
    beside: Beside[int, tuple[int, str]] = Beside()
    before = set(threading.enumerate())
    for _ in range(2):
        started = [beside.start(lambda n: (n, threading.current_thread().name), n) for n in (1, 2)]
        assert [future.result() for future in started] == [
            (1, "tensorprobe beside"),
            (2, "tensorprobe beside"),
        ]
        beside.stop()
        assert set(threading.enumerate()) <= before


def test_a_failure_is_its_caller_s() -> None:
    beside: Beside[int, float] = Beside()
    failed = beside.start(lambda n: 1 / n, 0)
    fine = beside.start(lambda n: 1 / n, 2)
    with pytest.raises(ZeroDivisionError):
        failed.result()
    assert fine.result() == 0.5
    beside.stop()


def test_it_works_while_the_interpreter_ends() -> None:
    code = (
        "import atexit\n"
        "from tensorprobe.store.beside import Beside\n"
        "early, late = Beside(), Beside()\n"
        "early.start(str, 1).result()\n"
        "def end(): print(early.start(str, 2).result(), late.start(str, 3).result())\n"
        "atexit.register(end)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("2 3\n", "")
