"""A summarizer between the threads of a program and the one that writes."""

import threading
from collections.abc import Callable

from tensorprobe.tensors.summarizer import Summarizer

N = 3


def in_threads(summarizer: Summarizer, work: Callable[[int], None]) -> None:
    """Do `work(0)` to `work(N - 1)` at once, while one more collects; all is there then."""
    done = threading.Event()

    def write() -> None:
        while not done.wait(0.001):
            summarizer.poll()

    workers = [threading.Thread(target=work, args=(part,)) for part in range(N)]
    writer = threading.Thread(target=write)
    for thread in [writer, *workers]:
        thread.start()
    for thread in workers:
        thread.join()
    summarizer.wait()
    done.set()
    writer.join()
