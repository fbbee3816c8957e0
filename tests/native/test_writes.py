"""What torch's operations write to is seen in C++, whoever calls them, and no version tells."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tensorprobe as tp
from tensorprobe import native

pytestmark = pytest.mark.skipif(
    native.MODULE is None, reason="not built: python -m tensorprobe.native.build"
)


class Numbers:
    """Contents of tensors, numbered as they come."""

    def __init__(self) -> None:
        self.made = 0
        self.marks: dict[int, int] = {}
        self._contents = native.MODULE.Contents(
            self._make, lambda tensor: None, self._make, None, None, self.marks, self._lent
        )
        self.watch = self._contents.watch_writes

    def _make(self, *content: Any) -> int:
        self.made += 1
        return self.made

    def _lent(self, tensor: Tensor, known: int | None, *content: Any) -> int:
        return self._make() if known is None else known

    def of(self, tensor: Tensor) -> int:
        number: int = self._contents.of(tensor, 1, None, "input", "0", "stats")
        return number


@torch.library.custom_op("tensorprobe_tests::fill", mutates_args=("written",))
def fill(given: Tensor, written: Tensor) -> None:
    written.numpy()[...] = 7


LIBRARY = torch.library.Library("tensorprobe_tests", "FRAGMENT")
LIBRARY.define("write_some(Tensor(a!)?[] written) -> ()")
LIBRARY.impl("write_some", lambda written: None, "CompositeExplicitAutograd")


# In its second run `given` and its sine wait on the stack while `neg_` is called.
script = torch.jit.CompilationUnit("""
def script(given: Tensor, written: Tensor) -> Tensor:
    return torch.addcmul(given, torch.sin(given), written.neg_())
""").script


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda x: x.data.mul_(2),
    "operator": lambda x: x.data.__imul__(2),
    "item": lambda x: x.data.__setitem__(0, 5.0),
    "out": lambda x: torch.add(torch.ones(3), 1, out=x.data),
    "by name": lambda x: torch.max(torch.ones(2, 3), 0, out=(x.data, torch.ones(3).long())),
    "by name alone": lambda x: torch.topk(torch.ones(4), 3, out=(x.data, torch.ones(3).long())),
    "by no name": lambda x: torch.ops.aten.rrelu_with_noise(torch.ones(3), x.data, training=True),
    "list": lambda x: torch._foreach_add_([torch.ones(3), x.data], 1.0),
    "view": lambda x: x.data[1:].zero_(),
    "copy": lambda x: x.data.copy_(torch.ones(3)),
    "custom": lambda x: fill(torch.ones(3), x.data),
    "list with none": lambda x: torch.ops.tensorprobe_tests.write_some([None, x.data]),
    "script": lambda x: script(torch.ones(3), x.data),
    "fused": lambda x: torch._fused_sgd_(
        [x.data], [torch.ones(3)], [], weight_decay=0, momentum=0, lr=0.1, dampening=0,
        nesterov=False, maximize=False, is_first_step=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("where", ["here", "in a thread", "in backward"])
@pytest.mark.parametrize("way", WRITES)
def test_what_no_version_tells(way: str, where: str) -> None:
    x, y = torch.ones(3), torch.ones(3)
    numbers = Numbers()
    numbers.watch(True)
    before = [numbers.of(x), numbers.of(y)]

    def write() -> None:
        with torch.no_grad():
            WRITES[way](x)

    if where == "here":
        write()
    elif where == "in a thread":
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    else:
        z = torch.ones(3, requires_grad=True) * 2
        z.register_hook(lambda gradient: write())
        z.sum().backward()
    assert x._version == 0
    after = [numbers.of(x), numbers.of(y)]
    assert after[0] not in before
    assert after[1] == before[1]
    assert [numbers.of(x), numbers.of(y)] == after
    numbers.watch(False)
    write()
    assert numbers.of(x) == after[0]


def test_what_is_only_read_is_known_on() -> None:
    x = torch.ones(3, 3)
    numbers = Numbers()
    numbers.watch(True)
    before = numbers.of(x)
    y = torch.zeros(3, 3)
    y.copy_(x).add_(x).addmm_(x, x)
    torch.add(x, x, out=y)
    torch._foreach_add_([y], [x])
    nn.functional.cross_entropy(x, torch.tensor([0, 1, 2]))
    x.to(torch.float64).sort()
    y[0] = x[0]
    assert numbers.of(x) == before
    numbers.watch(False)


def test_a_script_writes_to_what_it_says_it_does() -> None:
    for _ in range(3):
        x, y = torch.ones(3), torch.ones(3)
        numbers = Numbers()
        numbers.watch(True)
        before = [numbers.of(x), numbers.of(y)]
        script(x, y.data)
        after = [numbers.of(x), numbers.of(y)]
        numbers.watch(False)
        assert after[0] == before[0]
        assert after[1] not in before


def test_an_operator_that_is_defined_anew() -> None:
    x = torch.ones(3)
    numbers = Numbers()
    numbers.watch(True)
    for schema, is_written in (("Tensor x", False), ("Tensor(a!) x", True)):
        library = torch.library.Library("tensorprobe_tests_anew", "DEF")
        library.define(f"touch({schema}) -> ()")
        library.impl("touch", lambda x: None, "CompositeExplicitAutograd")
        before = numbers.of(x)
        torch.ops.tensorprobe_tests_anew.touch.default(x)
        assert (numbers.of(x) != before) == is_written
        library._destroy()
        del torch.ops.tensorprobe_tests_anew
    numbers.watch(False)


COLLECTIVES: dict[str, Callable[[Tensor], object]] = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "all_gather": lambda x: dist.all_gather([x], torch.ones(3)),
    "scatter": lambda x: dist.scatter(x, [torch.ones(3)]),
    "all_to_all": lambda x: dist.all_to_all_single(x, torch.ones(3)),
}


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.usefixtures("group")
def test_collectives(collective: str) -> None:
    x = torch.ones(3)
    numbers = Numbers()
    numbers.watch(True)
    before = numbers.of(x)
    COLLECTIVES[collective](x.data)
    assert numbers.of(x) != before
    numbers.watch(False)


def test_storages_that_python_knows() -> None:
    x = torch.ones(3)
    numbers = Numbers()
    numbers.watch(True)
    numbers.marks[x.untyped_storage()._cdata] = 1
    numbers.marks[5] = 2
    x.data.mul_(2)
    numbers.of(torch.ones(2))
    assert numbers.marks == {5: 2}
    numbers.watch(False)


def test_several_watch_and_one_ends() -> None:
    x = torch.ones(3)
    first, second = Numbers(), Numbers()
    for numbers in (first, second):
        numbers.watch(True)
        assert numbers.of(x) == 1
    first.watch(True)  # once is enough
    x.data.mul_(2)
    assert (first.of(x), second.of(x)) == (2, 2)
    first.watch(False)
    x.data.mul_(2)
    assert (first.of(x), second.of(x)) == (2, 3)
    del second  # with its watch
    x.data.mul_(2)
    assert first.of(x) == 2


def test_a_forked_process_goes_on() -> None:
    """Also where threads make their first calls meanwhile: those take a lock of torch's."""
    for _ in range(20):
        numbers = Numbers()
        numbers.watch(True)
        stop = threading.Event()
        threads = [threading.Thread(target=write_until, args=(stop,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            child = os.fork()
            if not child:
                os._exit(0 if sees_its_own_alone(numbers) else 1)
            assert os.waitpid(child, 0)[1] == 0
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            numbers.watch(False)


def write_until(stop: threading.Event) -> None:
    x = torch.ones(3)
    while not stop.is_set():
        x.data.mul_(1)


def sees_its_own_alone(numbers: Numbers) -> bool:
    """In a child, where nothing is seen but of those that begin there."""
    x = torch.ones(3)
    known = numbers.of(x)
    x.data.mul_(2)
    right = numbers.of(x) == known
    numbers.watch(True)
    x.data.mul_(2)
    right &= numbers.of(x) != known
    numbers.watch(False)
    return right


def test_a_parameter_written_through_data_is_read_again(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    seen = []
    with tp.Recorder(tmp_path, level="L0", keep="stats", step_on="explicit") as rec:
        for _ in range(2):
            for value in (1.0, 2.0):
                model.weight.data.fill_(value)
                seen.append(torch._C._len_torch_function_stack())
                model(torch.ones(1, 2))
            rec.step()
    assert seen == [0] * 4  # no mode
    run = tp.load(tmp_path)
    for step in (0, 1):
        names = [f"Module.Linear.forward.{number}" for number in range(2)]
        calls = [call for call in run.calls() if call.step == step and call.name in names]
        assert [call.tensor("parameters.weight").summary.max for call in calls] == [1.0, 2.0]
