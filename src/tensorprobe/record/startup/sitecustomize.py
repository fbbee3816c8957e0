"""What a Python imports first that a recorded program has started: it begins to record."""

import os
import sys


def _begin() -> None:
    here = os.path.dirname(__file__)
    # The program's own path may lead to no tensorprobe, or to another one than this.
    source = os.path.dirname(os.path.dirname(os.path.dirname(here)))
    added = source not in sys.path
    if added:
        sys.path.append(source)
    try:
        from tensorprobe.record import child_processes
    except ImportError as error:  # a Python without what tensorprobe needs runs as it is
        sys.stderr.write(f"tensorprobe: a process is not recorded: {error}\n")
        os.environ.pop("TENSORPROBE_CHILD", None)
        sys.path[:] = [each for each in sys.path if each != here]
        return
    finally:
        if added:
            sys.path.remove(source)
    child_processes.record_this_program()
    child_processes.run_next_sitecustomize()


if "TENSORPROBE_CHILD" in os.environ:
    _begin()
