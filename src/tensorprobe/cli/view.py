"""`tensorprobe view`: reports and recordings in a browser, also those too large for one file."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

from tensorprobe.cli.options import add_json, say_json
from tensorprobe.errors import BadUsage
from tensorprobe.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", metavar="PATH", nargs="+",
        help="the OUT of compare, check, run --guard or another verb, a recording, the folder of a "
        "monitor, or a folder of them",
    )  # fmt: skip
    parser.add_argument("--port", type=int, default=0, metavar="N", help="(default: a free one)")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    add_json(parser, "the address")


def run(args: argparse.Namespace) -> int:
    from tensorprobe.report.serving import Viewer

    if not 0 <= args.port < 65536:
        raise BadUsage(f"--port {args.port}: expected a number from 1 to 65535")
    viewer = Viewer([Path(path) for path in args.paths], args.port)
    with contextlib.suppress(KeyboardInterrupt):
        opened = not args.no_browser and _open_browser(viewer.address)
        if args.json:
            say_json({"format": 1, "address": viewer.address, "opened": opened})
        else:
            what = "opened in a browser" if opened else "open it"
            say(f"{viewer.address} ({what}; Ctrl+C ends it)")
        sys.stdout.flush()
        viewer.serve()
    return 0


def _open_browser(address: str) -> bool:
    """Whether a window has opened; browsers of a terminal would take it over."""
    has_windows = sys.platform == "darwin" or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
    if not has_windows:
        return False
    import webbrowser

    try:
        return webbrowser.open(address)
    except webbrowser.Error:
        return False
