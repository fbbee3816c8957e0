"""The summarizer beside a running program: what it refuses, and that it leaves no trace."""

import math
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tensorprobe.tensors import cuda_graphs as captures
from tensorprobe.tensors.backends import HostBackend, TorchBackend
from tensorprobe.tensors.summarizer import Summarizer, summarize
from tensors.at_once import in_threads
from tensors.test_statistics import PATHS, summarizer_for


@pytest.fixture(params=PATHS)
def summarizer(request: pytest.FixtureRequest) -> Summarizer:
    return summarizer_for(request.param, digest=True)


class Unknown(torch.Tensor):
    """A subclass that computes by itself."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Unknown":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError("the summarizer must not call into a subclass it does not know")


class Named(torch.Tensor):
    """A subclass that is a plain tensor with methods."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError("the summarizer must not be seen by a subclass")


def strange_tensors() -> Iterator[tuple[torch.Tensor, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # half of these kinds are deprecated or experimental
        x = torch.ones(2, 2)
        yield x.to_sparse(), "sparse_coo tensor: no summary"
        yield x.to_sparse_csr(), "sparse_csr tensor: no summary"
        yield x.to_mkldnn(), "mkldnn tensor: no summary"
        yield x.to("meta"), "meta tensor: no summary"
        yield torch.nested.nested_tensor([x, x]), "nested tensor: no summary"
        if hasattr(torch, "jagged"):  # from torch 2.2 on
            nested = torch.nested.nested_tensor([x, x], layout=torch.jagged)
            yield nested, "nested tensor: no summary"
        yield (
            torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
            "quantized tensor: no summary",
        )
        if hasattr(torch, "float4_e2m1fn_x2"):  # from torch 2.8 on
            yield x.byte().view(torch.float4_e2m1fn_x2), "float4_e2m1fn_x2 tensor: no summary"
        yield Unknown(x), f"{Unknown.__module__}.Unknown tensor: no summary"
        with FakeTensorMode():
            yield torch.ones(3), "torch._subclasses.fake_tensor.FakeTensor tensor: no summary"


@pytest.mark.filterwarnings("ignore")
def test_strange_tensors_are_refused_by_name(summarizer: Summarizer) -> None:
    for tensor, reason in strange_tensors():
        result = summarizer.submit(tensor)
        assert result.ready
        assert (result.summary, result.digest) == (None, None)
        assert result.error == reason


def test_functorch_wrappers_are_refused_and_plain_tensors_inside_are_not(
    summarizer: Summarizer,
) -> None:
    plain, seen = torch.randn(3), []

    def watched(x: torch.Tensor) -> torch.Tensor:
        seen.append((summarizer.submit(x), summarizer.submit(plain)))
        return x.sum()

    torch.vmap(watched)(torch.ones(2, 2))
    torch.func.grad(watched)(torch.ones(2))
    torch.func.functionalize(watched)(torch.ones(2))
    summarizer.wait()
    errors = [wrapped.error for wrapped, _ in seen]
    assert errors == [
        "functorch batched tensor: no summary",
        "functorch grad tensor: no summary",
        "functional tensor: no summary",
    ]
    assert all(result.summary == summarize(plain) for _, result in seen)


def test_freed_storages_are_not_read(summarizer: Summarizer) -> None:
    """As sharding libraries free parameters: tensors stay, with a shape and an address."""
    if not isinstance(summarizer._host, HostBackend):
        pytest.skip("torch itself reads it")
    whole = torch.ones(100_000)
    views = [whole, whole[4:], whole[4::2], whole[500:].view(100, -1).t(), whole.expand(2, 100_000)]
    assert all(summarizer.submit(view, 7).error is None for view in views[:1])
    for left in (0, 16, 1000):
        whole.untyped_storage().resize_(left)
        for form, view in [(7, whole), *((None, view) for view in views)]:
            result = summarizer.submit(view, form)
            assert result.error == "tensor whose storage was freed: no summary"


def test_convenience_says_why_not() -> None:
    with pytest.raises(ValueError, match="meta tensor: no summary"):
        summarize(torch.ones(2, device="meta"))


def test_plain_subclasses_parameters_and_inference_tensors(summarizer: Summarizer) -> None:
    numbers = torch.tensor([1.0, -2.0])
    with torch.inference_mode():
        inference = torch.tensor([1.0, -2.0])
    kinds = [
        numbers,
        numbers.as_subclass(Named),
        torch.nn.Parameter(numbers),
        torch.nn.Buffer(numbers),
        numbers.clone().requires_grad_() * 1,
        inference,
        torch.view_as_complex(torch.tensor([[0.0, -1.0], [0.0, 2.0]])).conj().imag,
    ]
    results = [summarizer.submit(kind) for kind in kinds]
    with torch.inference_mode():
        results.append(summarizer.submit(numbers))
    zero = summarizer.submit(torch._efficientzerotensor((2,)))
    summarizer.wait()
    assert {result.digest for result in results} == {results[0].digest}
    assert {result.summary for result in results} == {results[0].summary}
    assert zero.summary is not None
    assert zero.summary.zero_count == 2


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError(f"the summarizer called {func}")


class SeesKernels(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError(f"the summarizer called {func}")


def test_leaves_no_trace(summarizer: Summarizer) -> None:
    leaf = torch.randn(40, 30, requires_grad=True)
    tensors = [
        leaf,
        leaf.t()[::2],
        (leaf * 2)[:, :1].expand(40, 9),
        leaf.to(torch.complex64).conj(),
    ]
    tensors += [torch.arange(7), torch.tensor(True), torch.randn(3).bfloat16()]
    before = [tensor.detach().clone() for tensor in tensors]
    versions = [tensor._version for tensor in tensors]
    nodes = [tensor.grad_fn for tensor in tensors]
    state, grad_mode = torch.get_rng_state(), torch.is_grad_enabled()
    with SeesFunctions(), SeesKernels(), torch.autocast("cpu", torch.bfloat16):
        results = [summarizer.submit(tensor) for tensor in tensors]
        summarizer.flush()
        summarizer.poll()
        summarizer.wait()
    assert [result.error for result in results] == [None] * len(tensors)
    assert all(result.ready for result in results)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled() == grad_mode
    assert [tensor._version for tensor in tensors] == versions
    assert all(tensor.grad_fn is node for tensor, node in zip(tensors, nodes, strict=True))
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))
    cast = summarizer.submit(tensors[0])
    summarizer.wait()
    assert cast.summary == results[0].summary


def test_numpy_settings_of_the_program_do_not_matter(summarizer: Summarizer) -> None:
    with np.errstate(all="raise"):
        result = summarizer.submit(
            torch.tensor([1e300, float("nan"), float("inf"), 5e-324]).double()
        )
        summarizer.wait()
    assert result.error is None
    assert np.geterr()["over"] == "warn"


def test_threads_share_a_summarizer(summarizer: Summarizer) -> None:
    tensors = [torch.full((501,), float(n)) for n in range(60)]
    results: dict[int, object] = {}

    def work(part: int) -> None:
        for n in range(part, 60, 3):
            results[n] = summarizer.submit(tensors[n])

    in_threads(summarizer, work)
    assert [results[n].summary.max for n in range(60)] == [float(n) for n in range(60)]
    assert [results[n].digest for n in range(60)] == [
        Summarizer(stats=False, digest=True).submit(t).digest for t in tensors
    ]


def test_only_what_was_asked_for() -> None:
    tensor = torch.ones(3)
    neither = Summarizer(stats=False).submit(tensor)
    digest = Summarizer(stats=False, digest=True).submit(tensor)
    stats = Summarizer().submit(tensor)
    assert (neither.summary, neither.digest, neither.ready) == (None, None, True)
    assert (digest.summary, stats.digest) == (None, None)
    assert digest.digest is not None
    assert stats.summary is not None


def test_norms_do_not_overflow(summarizer: Summarizer) -> None:
    half = summarizer.submit(torch.full((1000,), 60000.0).half())
    double = summarizer.submit(torch.full((100_000,), 1e300, dtype=torch.float64))
    tiny = summarizer.submit(torch.full((100_000,), 1e-300, dtype=torch.float64))
    summarizer.wait()
    assert math.isclose(
        half.summary.norm, 60000.0 * math.sqrt(1000) * (59968 / 60000), rel_tol=1e-3
    )
    assert math.isclose(double.summary.norm, 1e300 * math.sqrt(100_000), rel_tol=1e-12)
    assert math.isclose(double.summary.mean, 1e300, rel_tol=1e-12)
    assert math.isclose(tiny.summary.norm, 1e-300 * math.sqrt(100_000), rel_tol=1e-12)


def test_large_tensors_are_cut_in_pieces(
    summarizer: Summarizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorprobe.tensors.torch_ops.BLOCK", 1 << 14)
    tensor = torch.randn(50_000, dtype=torch.float64)
    tensor[[7, 30_000, 49_999]] = torch.tensor([math.nan, -math.inf, 0.0], dtype=torch.float64)
    results = [summarizer.submit(tensor), summarizer.submit(tensor.view(100, 500)[::3, ::2])]
    summarizer.wait()
    finite = tensor[tensor.isfinite()]
    first = results[0].summary
    assert (first.nan_count, first.inf_count, first.zero_count) == (1, 1, 1)
    assert (first.min, first.max) == (-math.inf, finite.max().item())
    assert math.isclose(first.norm, finite.norm().item(), rel_tol=1e-12)
    part = tensor.view(100, 500)[::3, ::2].contiguous()
    again = Summarizer(digest=True).submit(part)
    assert results[1].digest == again.digest
    assert math.isclose(results[1].summary.norm, again.summary.norm, rel_tol=1e-12)


class FakeEvent:
    """Copies to the host that have arrived, but for those that failed."""

    def __init__(self, made: list["FakeEvent"]) -> None:
        self.fault: Exception | None = None
        made.append(self)

    def record(self) -> None:
        pass

    def query(self) -> bool:
        if self.fault is not None:
            raise self.fault
        return True

    synchronize = query


def test_results_that_are_lost_are_not_in_the_way_of_others() -> None:
    events: list[FakeEvent] = []
    backend = TorchBackend(torch.device("cpu"), stats=True, digest=False)
    backend._module = SimpleNamespace(Event=lambda: FakeEvent(events))
    summarizer = Summarizer(choose=lambda device, *, stats, digest: backend)
    lost = summarizer.submit(torch.ones(3))
    summarizer.flush()
    events[0].fault = RuntimeError("device-side assert")
    with pytest.raises(RuntimeError, match="device-side assert"):
        summarizer.land()
    found = summarizer.submit(torch.ones(3))
    summarizer.land()
    assert not found.ready, "nothing was flushed"
    summarizer.flush()
    summarizer.land()
    assert found.ready
    assert not lost.ready


@pytest.mark.parametrize("fails", [False, True])
def test_questions_to_cuda_leave_the_mode_of_the_thread_as_it_was(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode, asked = 0, []

    def exchange(new: Any) -> int:
        nonlocal mode
        mode, new._obj.value = new._obj.value, mode
        return 0

    def question() -> int:
        asked.append(mode)
        if fails:
            raise RuntimeError("device-side assert")
        return 7

    monkeypatch.setitem(captures._EXCHANGES, "cuda", lambda: exchange)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    if fails:
        with pytest.raises(RuntimeError, match="device-side assert"):
            captures.ask(torch.device("cuda", 0), question)
    else:
        assert captures.ask(torch.device("cuda", 0), question) == 7
    assert (asked, mode) == ([2], 0)
    assert captures.ask(torch.device("cpu"), lambda: mode) == 0


def _submitted(summarizer: Summarizer, tensor: torch.Tensor, *, whole: bool = False) -> Any:
    result = (summarizer.submit_whole if whole else summarizer.submit)(tensor)
    summarizer.wait()
    assert result.summary is not None
    return result


@pytest.mark.parametrize("name", PATHS)
def test_some_tensors_have_a_digest_beside_statistics(name: str) -> None:
    some = summarizer_for(name, digest_some=True)
    places, numbers = torch.randperm(12), torch.arange(12.0).reshape(3, 4)
    assert _submitted(some, places).digest == _submitted(Summarizer(digest=True), places).digest
    assert _submitted(some, places > 3).digest is not None
    assert _submitted(some, numbers).digest is None
    assert _submitted(some, numbers, whole=True).digest is not None
    assert not some.digests


@pytest.mark.parametrize("name", PATHS)
def test_a_matrix_and_its_transpose_have_one_digest_beside_statistics(name: str) -> None:
    some = summarizer_for(name, digest_some=True)
    matrix = torch.arange(12).reshape(3, 4)
    assert _submitted(some, matrix.t()).digest == _submitted(some, matrix).digest
    assert _submitted(some, matrix.t().contiguous()).digest != _submitted(some, matrix).digest
    assert _submitted(some, matrix[:, ::2]).digest is None, "it has holes"
    assert _submitted(some, matrix[:, :1].expand(3, 4)).digest is None, "it repeats"
    assert _submitted(some, matrix[:, ::2], whole=True).digest is None
