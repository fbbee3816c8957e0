"""The call that makes NaN or infinity is named, forward and backward, and disturbs nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tensorprobe as tp
from recorded import run_script, start_script
from tensorprobe.errors import BadUsage, GuardStopped
from tensorprobe.guarding.findings import Finding, describe, write_findings
from tiny_models import MODELS

LOOKS = pytest.mark.parametrize("look_every", [None, 10**6], ids=["at once", "later"])


def quiet(text: str) -> None:
    """Says nothing."""


def found(folder: Path, program: Callable[[], object], **options: Any) -> list[Finding]:
    with tp.Guard(folder, **{"overflow_nums": -1, "log": quiet, **options}) as guard:
        program()
    return list(guard.findings)


def overflow(count: int = 1) -> Tensor:
    return torch.full((count,), 1e30) * 1e30


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.exp(self.first(x) * self.factor)).softmax(-1)


def train(net: Net, bad_step: int, steps: int = 4) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        net.factor = 1000.0 if step == bad_step else 1.0
        net(torch.ones(4, 8)).log().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- forward -----------------------------------------------------------------------------------


def test_it_stops_before_backward_and_says_all(tmp_path: Path) -> None:
    said: list[str] = []
    net = Net()
    with pytest.raises(GuardStopped, match=r"overflowed once: Torch\.exp\.0\.forward in step 2"):
        with tp.Guard(tmp_path / "g", log=said.append) as guard:
            train(net, bad_step=2)
    assert all(p.isfinite().all() for p in net.parameters())
    [finding] = guard.findings
    assert (finding.name, finding.step, finding.rank) == ("Torch.exp.0.forward", 2, 0)
    assert finding.reason.startswith("its inputs are finite (")
    # Python 3.10 does not tell the class
    assert finding.stack[0].endswith(("in Net.forward", "in forward"))
    assert finding.travelled[0] == "Functional.linear.1.forward"
    assert finding.reached == "the loss"
    text = json.loads((tmp_path / "g" / "findings.json").read_text())
    assert text["format"] == 1
    assert text["findings"][0]["name"] == finding.name
    assert any(line.startswith("Torch.exp.0.forward is not finite (step 2") for line in said)
    assert said[-1].startswith("guard: 1 finding.")


def test_the_call_is_saved_and_can_be_run_alone(tmp_path: Path) -> None:
    [finding] = found(tmp_path / "g", lambda: train(Net(), bad_step=1, steps=2))[:1]
    capture = tp.load(finding.inputs)
    call = capture.call(finding.name, step=1)
    assert call.stack == finding.stack
    assert torch.equal(call.tensor("input.0").load().exp(), call.tensor("output.0").load())
    assert call.tensor("output.0").summary.inf_count > 0
    assert finding.repro is not None
    script = (Path(finding.repro) / "repro.py").read_text()
    done = run_script(Path(finding.repro), script, "--device", "cpu")
    assert done.stdout.endswith("PASS\n"), done.stderr  # exp is right: it was given too much


@LOOKS
def test_each_is_counted_and_the_nth_stops(tmp_path: Path, look_every: int | None) -> None:
    def program() -> None:
        for _ in range(5):
            overflow(3).sum()
            guard.step()

    guard = tp.Guard(tmp_path, overflow_nums=3, look_every=look_every, log=quiet)
    with pytest.raises(GuardStopped, match="3 times"):
        with guard:
            program()
    assert [(f.name, f.step) for f in guard.findings] == [
        ("Tensor.mul.0.forward", step) for step in range(3)
    ]
    assert guard.findings[0].travelled == ("Tensor.sum.0.forward",)


def test_it_never_stops_with_minus_one(tmp_path: Path) -> None:
    findings = found(tmp_path, lambda: [overflow() for _ in range(30)])
    assert len(findings) == 30
    assert len(tp.load(tmp_path / "capture").calls) == 20  # tensors of the first ones


def test_range(tmp_path: Path) -> None:
    guard = tp.Guard(tmp_path, overflow_nums=-1, log=quiet)
    overflow(1)
    guard.start()
    overflow(2)
    guard.stop()
    overflow(3)
    guard.start()
    overflow(4)
    guard.close()
    assert [f.metrics["output.0"]["shape"] for f in guard.findings] == [[2], [4]]


def test_inputs_of_an_in_place_call_are_those_before(tmp_path: Path) -> None:
    def program() -> None:
        x = torch.full((3,), 1e30)
        x.mul_(x)

    [finding] = found(tmp_path, program)
    call = tp.load(finding.inputs).call("Tensor.mul_.0.forward")
    assert torch.equal(call.tensor("input.0").load(), torch.full((3,), 1e30))
    assert torch.equal(call.tensor("input.1").load(), torch.full((3,), 1e30))
    assert call.tensor("output.0").load().isinf().all()


def test_an_in_place_call_found_later(tmp_path: Path) -> None:
    def program() -> None:
        x = torch.full((3,), 1e30)
        (x * 1).mul_(x).add_(1)

    [finding] = found(tmp_path, program, look_every=1000)
    assert finding.name == "Tensor.mul_.0.forward"
    assert finding.travelled == ("Tensor.add_.0.forward",)


def test_assignment_and_lists(tmp_path: Path) -> None:
    def program() -> None:
        x = torch.ones(4)
        x[1:2] = torch.tensor([1e30]) * 1e30
        torch._foreach_mul_([torch.full((2,), 1e30)], 1e30)

    findings = found(tmp_path, program)
    assert [f.name for f in findings] == ["Tensor.mul.0.forward", "Torch._foreach_mul_.0.forward"]
    assert findings[0].travelled == ("Tensor.__setitem__.0.forward",)


def test_a_value_that_came_from_outside_is_reported_where_it_is_read(tmp_path: Path) -> None:
    data = torch.tensor([1.0, float("nan")])
    weight = torch.ones(2, requires_grad=True)
    [finding] = found(tmp_path, lambda: (data.unsqueeze(0).clone() @ weight).relu().backward())
    assert finding.name == "Tensor.matmul.0.forward"
    assert "1 NaN in input.0, which no call that was watched has made" in finding.reason


# ---- backward ----------------------------------------------------------------------------------


@LOOKS
def test_backward_of_a_root(tmp_path: Path, look_every: int | None) -> None:
    def program() -> None:
        x = torch.zeros(3, requires_grad=True)
        (torch.sqrt(x * 2) * 3).sum().backward()

    [finding] = found(tmp_path, program, look_every=look_every)
    assert finding.name == "Torch.sqrt.0.backward"
    assert finding.direction == "backward"
    assert finding.travelled == ("Tensor.mul.0.backward",)
    assert finding.stack[0].endswith("in test_backward_of_a_root.<locals>.program")


def test_backward_is_saved_with_its_forward(tmp_path: Path) -> None:
    x = torch.zeros(3, requires_grad=True)
    [finding] = found(tmp_path, lambda: torch.sqrt(x).sum().backward())
    capture = tp.load(finding.inputs)
    assert [call.name for call in capture.calls] == ["Torch.sqrt.0.forward", finding.name]
    assert capture.calls[1].tensor("output.0").summary.inf_count == 3
    assert finding.repro is not None


def test_backward_whose_inputs_are_gone_says_what_to_type(tmp_path: Path) -> None:
    def program() -> None:
        x = torch.zeros(3, requires_grad=True)
        torch.sqrt(x.exp() - 1).sum().backward()  # sqrt keeps its result, not its input

    [finding] = found(tmp_path, program, rerun="train.py --lr 1")
    assert finding.name == "Torch.sqrt.0.backward"
    wanted = "--calls Torch.sqrt.0.forward,Torch.sqrt.0.backward --steps 0 --keep tensors"
    assert wanted in finding.next
    assert finding.next.endswith(f"-o {tmp_path}/again train.py --lr 1")
    assert tp.load(tmp_path / "capture").calls[0].name == finding.name  # the gradients are there


def test_gradients_that_overflow_when_added(tmp_path: Path) -> None:
    def program() -> None:
        x = torch.ones(2, dtype=torch.float16, requires_grad=True)
        y = x * 1
        (y * 200 + y * 100).backward(torch.full((2,), 300.0, dtype=torch.float16))

    [finding] = found(tmp_path, program)
    assert finding.name == "Tensor.mul.0.backward"
    assert "the sum of the gradients that meet there overflows" in finding.reason


@LOOKS
def test_gradients_that_are_read_again(tmp_path: Path, look_every: int | None) -> None:
    def program() -> None:
        torch.ones(2) * 1  # from here on the guard knows that it looks later
        weight = torch.tensor([-1.0, 2.0], requires_grad=True)
        weight.sqrt().sum().backward()
        nn.utils.clip_grad_norm_([weight], 1.0)

    [finding] = found(tmp_path, program, look_every=look_every)
    assert finding.name == "Tensor.sqrt.0.forward"
    assert "Torch._foreach_norm.0.forward" in finding.travelled


def test_a_mask_that_is_transposed_after_an_overflow(tmp_path: Path) -> None:
    def program() -> None:
        bad = overflow()  # from here on views are looked at
        torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]).t()
        del bad

    [finding] = found(tmp_path, program)
    assert finding.name == "Tensor.mul.0.forward"


def test_parameters_after_an_optimizer(tmp_path: Path) -> None:
    def program() -> None:
        weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
        optimizer = torch.optim.Adam([weight], lr=1e-3, eps=1e-8)  # eps is 0 in half
        for _ in range(3):
            (weight * torch.tensor([1e-5, 0.0]).half()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    [finding] = found(tmp_path, program)[:1]
    assert finding.name == "Optimizer.Adam.step.0"
    assert finding.step == 0
    assert "the gradients are finite" in finding.reason
    assert "--calls Optimizer.Adam.step.0 --steps 0 --keep tensors" in finding.next


@pytest.mark.parametrize("look_every", [None, 4])
def test_what_the_closure_of_an_optimizer_does(tmp_path: Path, look_every: int | None) -> None:
    """Its calls are the program's; those of the optimizer around it are one."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    guard = tp.Guard(
        tmp_path, overflow_nums=-1, look_every=look_every, log=lambda text: None
    )  # fmt: skip
    with guard:
        for step in range(4):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = model(torch.ones(2, 4) * (1e38 if step == 2 else 1)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
    first, *others = [(found.name, found.step) for found in guard.findings]
    assert first == ("Tensor.square.0.forward", 2)
    assert not [name for name, _ in others if name.startswith(("Torch.dot", "Tensor.add_"))]


def test_parameters_that_an_earlier_step_spoiled(tmp_path: Path) -> None:
    def program() -> None:
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.01)
        for step in range(3):
            (weight * (1e38 if step == 1 else 1) * 10).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    findings = found(tmp_path, program)
    assert [(f.name, f.step) for f in findings] == [
        ("Tensor.mul.1.forward", 1),
        ("Tensor.mul.0.forward", 2),
    ]
    assert findings[1].reason == (
        "it reads input.0, a parameter that Tensor.mul.1.forward has spoiled in step 1"
    )


def test_custom_functions_and_checkpoints(tmp_path: Path) -> None:
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return torch.from_numpy(grad.numpy() / 0)  # not by torch

    def program() -> None:
        x = torch.ones(3, requires_grad=True)
        checkpoint(lambda t: Odd.apply(t * 2) * 3, x, use_reentrant=False).sum().backward()

    with pytest.warns(RuntimeWarning, match="divide"):
        [finding] = found(tmp_path, program)
    assert finding.name.startswith("Function.Odd.")
    assert finding.direction == "backward"


def test_a_call_inside_backward(tmp_path: Path) -> None:
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return torch.log(grad - grad)

    x = torch.ones(3, requires_grad=True)
    [finding] = found(tmp_path, lambda: Odd.apply(x).sum().backward())
    assert finding.name == "Torch.log.0.forward"
    assert "it takes the logarithm of zero" in finding.reason
    assert finding.reason.endswith("it runs inside backward")


# ---- GradScaler --------------------------------------------------------------------------------


def scaled_training(optimizer_kind: Any, **options: Any) -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = optimizer_kind([weight], lr=0.01, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=100)
    for _ in range(4):
        loss = (weight.half() * 1.0).sum()
        scaler.scale(loss.float()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@LOOKS
@pytest.mark.parametrize(
    ("kind", "options"), [(torch.optim.SGD, {}), (torch.optim.Adam, {"fused": True})]
)
def test_steps_that_a_scaler_skips_are_counted(
    tmp_path: Path, kind: Any, options: Any, look_every: int | None
) -> None:
    guard = tp.Guard(tmp_path, look_every=look_every, log=quiet)
    with guard:
        scaled_training(kind, **options)
    assert guard.findings == ()
    report = json.loads((tmp_path / "findings.json").read_text())
    assert report["skipped_steps"] == [0, 1]
    assert [(found["name"], found["step"]) for found in report["forgiven"]] == [
        ("Tensor.float.0.backward", 0), ("Tensor.float.0.backward", 1),
    ]  # fmt: skip
    assert all("test_overflow.py" in found["stack"][0] for found in report["forgiven"])


@LOOKS
def test_a_scale_that_only_falls_is_a_fault_in_the_end(
    tmp_path: Path, look_every: int | None
) -> None:
    def program() -> None:
        weight = nn.Parameter(torch.zeros(4))
        optimizer = torch.optim.SGD([weight], lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for _ in range(9):
            scaler.scale(weight.sqrt().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    with pytest.raises(GuardStopped):
        with tp.Guard(tmp_path, look_every=look_every, log=quiet) as guard:
            program()
    [finding] = guard.findings
    assert (finding.name, finding.step) == ("Tensor.sqrt.0.backward", 3)
    assert json.loads((tmp_path / "findings.json").read_text())["skipped_steps"] == [0, 1, 2, 3]


def test_a_forward_overflow_under_a_scaler_is_a_fault(tmp_path: Path) -> None:
    def program() -> None:
        weight = nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], lr=0.01)
        scaler = torch.amp.GradScaler("cpu")
        loss = (weight.half() * 60000.0 * 2).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    with pytest.raises(GuardStopped):
        with tp.Guard(tmp_path, log=quiet) as guard:
            program()
    assert guard.findings[0].name == "Tensor.mul.1.forward"


# ---- before it happens -------------------------------------------------------------------------


@LOOKS
def test_values_that_grow_towards_the_limit(tmp_path: Path, look_every: int | None) -> None:
    def program() -> None:
        for factor in (100.0, 150.0, 190.0, 192.0):
            torch.full((4,), factor).half() * 320.0
            guard.step()

    guard = tp.Guard(tmp_path, look_every=look_every, log=quiet)
    with guard:
        program()
    assert guard.findings == ()
    [warning] = json.loads((tmp_path / "findings.json").read_text())["warnings"]
    assert (warning["name"], warning["step"]) == ("Tensor.mul.0.forward.output.0", 2)
    assert "are 93% of what their dtype holds, and grow: 48000 in step 1" in warning["reason"]


# ---- real models -------------------------------------------------------------------------------


@LOOKS
def test_a_deep_model_that_overflows_in_half(tmp_path: Path, look_every: int | None) -> None:
    model, run = MODELS["llama"]()
    model.half()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(3000)
        model.model.layers[1].mlp.gate_proj.weight.mul_(3000)
    guard = tp.Guard(tmp_path, look_every=look_every, log=quiet)
    with pytest.raises(GuardStopped):
        with guard:
            run(model).backward()
    [finding] = guard.findings
    assert finding.module == "model.layers.1.mlp"
    assert finding.name == "Tensor.mul.13.forward" or finding.op == "torch.Tensor.mul"
    assert finding.stack[0].endswith("in LlamaMLP.forward")


@LOOKS
def test_a_deep_model_that_overflows_in_backward(tmp_path: Path, look_every: int | None) -> None:
    model, run = MODELS["gpt2"]()
    model.half()
    guard = tp.Guard(tmp_path, look_every=look_every, log=quiet)
    with pytest.raises(GuardStopped):
        with guard:
            (run(model).float() * 3e7).backward()
    [finding] = guard.findings
    assert finding.direction == "backward"
    assert finding.affected > 20


# ---- undisturbed -------------------------------------------------------------------------------


def state_after(program: Callable[[nn.Module], None], kind: str) -> list[Tensor]:
    torch.manual_seed(3)
    model, run = MODELS[kind]()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        run(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*(p.detach().clone() for p in model.parameters()), torch.get_rng_state()]


@LOOKS
@pytest.mark.parametrize("kind", ["gpt2", "bert", "mixtral"])
def test_results_are_the_same_bits(tmp_path: Path, kind: str, look_every: int | None) -> None:
    bare = state_after(lambda model: None, kind)
    with tp.Guard(tmp_path, ("overflow",), look_every=look_every, log=quiet) as guard:
        guarded = state_after(lambda model: None, kind)
    assert guard.findings == ()
    assert "gaps" not in json.loads((tmp_path / "findings.json").read_text())
    assert all(torch.equal(a, b) for a, b in zip(bare, guarded, strict=True))


@pytest.mark.parametrize("outer", ["guard", "recorder"])
def test_a_guard_and_a_recorder_see_the_users_calls_only(tmp_path: Path, outer: str) -> None:
    def program() -> None:
        x = torch.ones(4, requires_grad=True)
        F.relu(x * 2).sum().backward()
        overflow()

    with tp.Recorder(tmp_path / "alone", level="L1", log=quiet):
        program()
    recorder = tp.Recorder(tmp_path / "both", level="L1", log=quiet)
    guard = tp.Guard(tmp_path / "guard", overflow_nums=-1, log=quiet)
    first, second = (guard, recorder) if outer == "guard" else (recorder, guard)
    with first, second:
        program()
    assert [f.name for f in guard.findings] == ["Tensor.mul.1.forward"]
    alone, both = tp.load(tmp_path / "alone"), tp.load(tmp_path / "both")
    assert [call.name for call in both.calls] == [call.name for call in alone.calls]
    assert both.gaps == alone.gaps


def test_torch_func_and_compiled_parts(tmp_path: Path) -> None:
    def program() -> None:
        torch.func.grad(lambda x: (x * x).sum())(torch.ones(3))
        torch.func.vmap(lambda x: x * 1e30)(torch.full((3, 2), 1e30))
        torch.compile(lambda x: torch.log(x) * 2, backend="eager")(torch.zeros(2)) + 1

    findings = found(tmp_path, program)
    assert [f.name for f in findings][:1] == ["Tensor.mul.1.forward"]


def test_workers_of_a_loader_are_left_alone(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        "import torch, tensorprobe as tp\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): return torch.ones(2) * 1e30 * 1e30\n"
        "with tp.Guard('g') as guard:\n"
        "    for batch in torch.utils.data.DataLoader(Data(), num_workers=1): pass\n"
        "print(len(guard.findings))\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0"


RANK = """
import os, sys, torch, torch.distributed as dist
import tensorprobe as tp
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
with tp.Guard("g", overflow_nums=-1, look_every=int(sys.argv[2]) or None) as guard:
    x = torch.full((3,), 1e30)
    y = x * (x if rank == 0 else 1)
    dist.all_reduce(y)
    y + 1
print([(f.name, f.rank, f.travelled) for f in guard.findings])
dist.destroy_process_group()
"""


@pytest.mark.parametrize("look_every", ["0", "1000"])
def test_infinity_from_another_rank(tmp_path: Path, look_every: str) -> None:
    environ = {"WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    arguments = (str(tmp_path / "store"), look_every)
    ranks = [
        start_script(tmp_path, RANK, *arguments, RANK=rank, LOCAL_RANK=rank, **environ)
        for rank in ("0", "1")
    ]
    first, second = (process.communicate(timeout=120) for process in ranks)
    after = ("Tensor.add.0.forward",)
    made = [("Tensor.mul.0.forward", 0, ("Distributed.all_reduce.0.forward", *after))]
    assert first[0].strip() == str(made), first[1]
    assert second[0].strip() == str([("Distributed.all_reduce.0.forward", 1, after)]), second[1]


# ---- keeping the last steps --------------------------------------------------------------------


def test_steps_count_while_nothing_is_watched(tmp_path: Path) -> None:
    guard = tp.Guard(tmp_path / "g", overflow_nums=-1, log=quiet)
    guard.step()  # before the first start
    guard.start()
    overflow()
    guard.stop()
    guard.step()
    guard.step()
    guard.start()
    overflow()
    guard.stop()
    guard.start()  # the same step: numbers of calls stand
    overflow()
    guard.close()
    assert [(f.name, f.step) for f in guard.findings] == [
        ("Tensor.mul.0.forward", 1),
        ("Tensor.mul.0.forward", 3),
        ("Tensor.mul.1.forward", 3),
    ]
    calls = tp.load(tmp_path / "g" / "capture").calls
    assert [(call.name, call.step) for call in calls] == [(f.name, f.step) for f in guard.findings]


@pytest.mark.parametrize("bad_step", [3, 99])
def test_keep_last(tmp_path: Path, bad_step: int) -> None:
    guard = tp.Guard(tmp_path / "g", overflow_nums=-1, keep_last=2, log=quiet)
    net = Net()
    with guard:
        train(net, bad_step=bad_step, steps=6)
    kept = tp.load(tmp_path / "g" / "recording").steps
    assert kept == ((2, 3, 4, 5) if bad_step == 3 else (4, 5))


def test_keep_last_of_ones_own_recorder(tmp_path: Path) -> None:
    recorder = tp.Recorder(tmp_path / "r", keep_last=2, log=quiet)
    guard = tp.Guard(tmp_path / "g", overflow_nums=-1, recorder=recorder, log=quiet)
    with recorder, guard:
        for step in range(6):
            torch.ones(1) * 1e30 * (1e30 if step == 3 else 1)
            guard.step()
            recorder.step()
    assert tp.load(tmp_path / "r").steps == (2, 3, 4, 5)
    with pytest.raises(BadUsage, match="give keep_last to the Recorder"):
        tp.Guard(tmp_path / "h", keep_last=1, recorder=recorder)


# ---- findings ----------------------------------------------------------------------------------


def finding(**changes: Any) -> Finding:
    facts: dict[str, Any] = {
        "name": "Torch.exp.0.forward", "kind": "nonfinite", "direction": "forward", "step": 2,
        "rank": 0, "module": "net", "op": "torch.exp", "stack": ("a.py:1 in f",), "reason": "why",
    }  # fmt: skip
    return Finding(**facts | changes)


def test_findings_are_strict_json(tmp_path: Path) -> None:
    path = write_findings(tmp_path, [finding(metrics={"max": float("inf"), "x": [float("nan")]})])
    content = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert content["findings"][0]["metrics"] == {"max": "inf", "x": ["nan"]}


def test_what_a_person_reads() -> None:
    text = describe(
        finding(travelled=("A.0", "B.0"), affected=9, reached="the loss", next="tensorprobe show x")
    )
    assert text == (
        "Torch.exp.0.forward is not finite (step 2, rank 0): why\n"
        "  in net, torch.exp, a.py:1 in f\n"
        "  then in A.0, B.0 and 7 more\n"
        "  it reached the loss\n"
        "  next: tensorprobe show x"
    )


def test_a_second_run_moves_what_the_first_found(tmp_path: Path) -> None:
    for _ in range(2):
        found(tmp_path, overflow)
    assert (tmp_path / "earlier" / "1" / "findings.json").exists()
    assert (tmp_path / "capture" / "earlier" / "1").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"watch": ("overflows",)}, "unknown guard 'overflows': expected overflow or errors"),
        ({"watch": ()}, "nothing to watch"),
        ({"overflow_nums": 0}, "overflow_nums=0: expected a number from 1, or -1"),
        ({"look_every": 0}, "look_every=0: expected a number of calls from 1"),
    ],
)
def test_wrong_arguments(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(BadUsage, match=message):
        tp.Guard(tmp_path, **options)
