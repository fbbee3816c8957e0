"""`tensorprobe upload`: a recording, or what is left of it, to object storage."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from tensorprobe.terminal import busy, say

_EPILOG = """\
example:
  tensorprobe upload ~/.cache/tensorprobe/spools/s3/bucket/run s3://bucket/run

Sends what is not there yet. A recorder that writes to a URL does this by itself; the command is for
what was left when the upload failed, or the program and its uploader were killed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", metavar="FOLDER", help="the recording: a run's folder")
    parser.add_argument("url", metavar="URL", help="where it goes: s3://BUCKET/FOLDER")
    parser.add_argument("--json", action="store_true", help="print numbers as JSON")


def run(args: argparse.Namespace) -> int:
    from tensorprobe.store.uploading import check_folder_and_url, upload

    folder = Path(args.folder)
    check_folder_and_url(folder, args.url)
    with busy(f"sending {folder} to {args.url}"):
        sent = upload(folder, args.url)
    if args.json:
        say(json.dumps({"format": 1, "url": args.url, **sent._asdict()}))
    else:
        say(
            f"sent {sent.files} files, {sent.nbytes:,} bytes, to {args.url}; "
            f"{sent.kept} were there already. Next: tensorprobe show {shlex.quote(args.url)}"
        )
    return 0
