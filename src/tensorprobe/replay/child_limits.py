"""How much memory and time a call that comes from a file may take."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

_SHARE = 2  # half of the machine's memory, for all processes together


def limit_memory(processes: int = 1) -> None:
    """Let this process have no more than its part of half of the machine's memory.

    What counts is memory that can be written to: of address space a device's driver reserves more
    than there is.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # no Linux: no such limit
        return
    found = re.search(r"VmData:\s+(\d+) kB", status)
    used = int(found[1]) * 1024 if found else 0
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted = used + total // (_SHARE * max(processes, 1))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


def child_command(code: str) -> list[str]:
    """The command of a Python that runs `code` and finds packages where this process does."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"]


def run_limited(script: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a script in a process with a limit of memory and time."""
    # not by its name on the command line: then Python looks beside it for what it imports first
    code = (
        "from tensorprobe.replay.child_limits import limit_memory\n"
        f"limit_memory(); sys.argv = [{str(script)!r}]; sys.path.append({str(script.parent)!r})\n"
        f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    return subprocess.run(
        child_command(code),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=timeout_s,
    )
