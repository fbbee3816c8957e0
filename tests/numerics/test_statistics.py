"""Statistics of every dtype, content and layout against exact arithmetic, on both CPU paths."""

import pytest
import torch

from numerics import cases
from tensorprobe.numerics.backends import HostBackend, TorchBackend
from tensorprobe.numerics.summary import Summarizer

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
PATHS = {"host": HostBackend, "torch": TorchBackend}


def summarizer_for(path: str, *, stats: bool = True, digest: bool = False) -> Summarizer:
    def choose(device: torch.device, *, stats: bool, digest: bool) -> HostBackend | TorchBackend:
        if path == "host":
            return HostBackend(stats=stats, digest=digest)
        return TorchBackend(device, stats=stats, digest=digest)

    return Summarizer(stats=stats, digest=digest, choose=choose)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.title)
def test_equal_exact_arithmetic(path: str, dtype: torch.dtype) -> None:
    summarizer = summarizer_for(path)
    submitted = [(n, t, summarizer.submit(t)) for n, t in cases.all_cases(dtype)]
    summarizer.wait()
    for name, tensor, result in submitted:
        assert result.ready, name
        assert result.error is None, name
        cases.assert_summary(result.summary, tensor)
