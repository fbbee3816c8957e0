"""How much one step takes on disk with its tensors, against the peer's files of the same step.

    python benchmarks/volume.py --peer-python PYTHON      (one that has mindstudio-probe)

Both record the same training step in full. We keep calls and roles that the peer has not (what an
optimizer wrote, views, casts, more gradients), so the second ratio is of the same selection: the
tensors that both have, by name. The last two columns are that with compress=True.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from recording import SIZES, build, folder_nbytes


def record_ours(folder: Path, level: str, args: argparse.Namespace, *, compress: bool) -> None:
    import tensorprobe as tp

    _, step = build(SIZES[args.size], "cpu", args.dtype)
    step()
    options = {"level": level, "keep": "tensors", "compress": compress}
    options["operators"] = "dunder"  # named as the peer does
    with tp.Recorder(folder, log=lambda text: None, **options) as recorder:
        step()
        recorder.step()


def record_peer(folder: Path, level: str, args: argparse.Namespace) -> None:
    """In a process of its own; its dump is left in the folder."""
    folder.mkdir()
    spec = json.dumps([str(folder), level, args.size, args.dtype])
    subprocess.run(
        [args.peer_python, __file__, "--peer-child", spec],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=args.peer_timeout,
    )


def peer_child(path: str, level: str, size: str, dtype: str) -> None:
    folder = Path(path)
    config = {
        "task": "tensor",
        "dump_path": str(folder / "dump"),
        "rank": [],
        "step": [],
        "level": level,
        "tensor": {"scope": [], "list": []},
    }
    (folder / "config.json").write_text(json.dumps(config))
    from msprobe.pytorch import PrecisionDebugger

    debugger = PrecisionDebugger(config_path=str(folder / "config.json"))
    model, step = build(SIZES[size], "cpu", dtype)
    step()
    debugger.start(model=model)
    step()
    debugger.stop()
    debugger.step()


def compare(ours: Path, peer: Path) -> dict[str, float]:
    """Bytes of both, in all and of the tensors that both have."""
    import tensorprobe as tp

    files = {file.stem: file.stat().st_blocks * 512 for file in peer.rglob("*.pt")}
    named = [tensor for call in tp.load(ours).calls() for tensor in call.tensors if tensor.blob]
    shared = {tensor.blob for tensor in named if tensor.name in files}
    alone = {tensor.blob for tensor in named} - shared
    names = {tensor.name for tensor in named}
    total = folder_nbytes(ours)
    return {
        "peer": folder_nbytes(peer),
        "ours": total,
        "peer_same": sum(nbytes for name, nbytes in files.items() if name in names),
        "ours_same": total - sum(blob.packed_nbytes or blob.nbytes for blob in alone),
        "names_same": len(names & files.keys()),
        "names_peer": len(files),
        "names_ours": len(names),
    }


def row(level: str, found: dict[str, float], packed: dict[str, float]) -> str:
    mb = {name: f"{nbytes / 1e6:.0f}" for name, nbytes in found.items()}
    cells = [
        level,
        mb["peer"],
        mb["ours"],
        f"{found['peer'] / found['ours']:.2f}x",
        f"{found['names_same']} of {found['names_peer']}, {found['names_ours']}",
        mb["peer_same"],
        mb["ours_same"],
        f"{found['peer_same'] / found['ours_same']:.2f}x",
        f"{packed['ours_same'] / 1e6:.0f}",
        f"{packed['peer_same'] / packed['ours_same']:.2f}x",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--levels", nargs="*", default=["L0", "L1", "mix"])
    parser.add_argument("--scratch", default=None)
    parser.add_argument("--peer-python", default=os.environ.get("TENSORPROBE_PEER_PYTHON"))
    parser.add_argument("--peer-timeout", type=float, default=600)
    parser.add_argument("--peer-child", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer_child:
        peer_child(*json.loads(args.peer_child))
        return
    if not args.peer_python:
        parser.error("give --peer-python: a Python that has mindstudio-probe")
    import torch

    print(f"{args.size} Llama {args.dtype}, torch {torch.__version__}, ", end="")
    print(f"python {platform.python_version()}")
    titles = ["level", "msprobe MB", "ours MB", "ratio", "tensors both have", "msprobe MB"]
    titles += ["ours MB", "ratio", "compressed MB", "ratio"]
    print(f"| {' | '.join(titles)} |\n|{' --- |' * len(titles)}")
    for level in args.levels:
        folder = Path(tempfile.mkdtemp(dir=args.scratch))
        try:
            record_peer(folder / "peer", level, args)
            found = []
            for compress in (False, True):
                record_ours(folder / "ours", level, args, compress=compress)
                found.append(compare(folder / "ours", folder / "peer"))
                shutil.rmtree(folder / "ours")
        finally:
            shutil.rmtree(folder)
        print(row(level, *found), flush=True)
        sys.stderr.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
