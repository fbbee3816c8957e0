"""Parts of the recorder in C++, against the insides of torch: built where they are wanted.

`python -m tensorprobe.native.build` builds them for the torch and the Python that run it. MODULE is
None where that was not done for just these, or the variable TENSORPROBE_NATIVE is 0; the classes in
Python that each part stands in for do the work then, with the same lines in the capture.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch

NAME = "tensorprobe_native"
FOLDER = Path(__file__).parent
SWITCH = "TENSORPROBE_NATIVE"


def places() -> list[Path]:
    """Where the built module may lie: with the package, or where that cannot be written to."""
    digest = hashlib.sha256()
    for source in sorted((*FOLDER.glob("*.h"), *FOLDER.glob("*.cpp"))):
        digest.update(source.read_bytes())
    git_version = getattr(torch.version, "git_version", "")
    digest.update(f"{torch.__version__} {git_version}".encode())
    soabi = sysconfig.get_config_var("SOABI")
    file = f"{NAME}-{torch.__version__}-{digest.hexdigest()[:12]}.{soabi}.so"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [FOLDER / file, Path(cache, "tensorprobe", file)]


def load() -> Any:
    """The module, where it was built from these sources for this torch and Python; or None."""
    if os.environ.get(SWITCH) == "0":
        return None
    for path in places():
        if os.path.exists(path):  # not Path's: it raises where a folder may not be looked into
            loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
            spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
            assert spec is not None, path
            try:
                module = importlib.util.module_from_spec(spec)
                loader.exec_module(module)
            except (
                ImportError,
                OSError,
            ):  # of a compiler or a C library that do not go with torch's
                continue
            return module
    return None


MODULE: Any = load()
