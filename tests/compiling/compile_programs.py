"""Programs with a fault planted into torch.compile: python compile_programs.py KIND [--eager]."""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn

KINDS = (
    "healthy", "decomposition", "backward", "dropout", "seed", "passes", "lowering", "alias",
    "shape", "guard", "branch",
)  # fmt: skip


def plant(kind: str) -> None:
    """Put the fault in."""
    aten = torch.ops.aten
    if kind in ("healthy", "guard", "branch"):
        return
    from torch._inductor import decomposition, lowering

    def decompose(operator, function):
        for table in (decomposition.decompositions, decomposition.extra_random_decomps):
            if operator in table or table is decomposition.decompositions:
                table[operator] = function
        decomposition.fast_random_decomps.cache_clear()

    lowerings = lowering.lowerings
    if kind == "decomposition":
        decompose(aten.gelu.default, lambda a, approximate="none": a * (1 + torch.erf(a * 0.7)) / 2)
    elif kind == "backward":

        def backward(gradient, a, approximate="none"):
            below = (1 + torch.erf(a * 0.7)) / 2
            return gradient * (below + a * torch.exp(a * a * -0.5) * 0.41)

        decompose(aten.gelu_backward.default, backward)
    elif kind == "dropout":

        def keep_too_few(a, p, train):
            mask = torch.rand_like(a) < p
            return mask * a * (1 / (1 - p)), mask

        decompose(aten.native_dropout.default, keep_too_few)
    elif kind == "seed":
        lookup = torch.ops.prims.inductor_lookup_seed.default
        good = lowerings[lookup]
        lowerings[lookup] = lambda seeds, number: good(seeds, 0)
    elif kind == "passes":
        import torch._inductor.config as config
        from torch._inductor.custom_graph_pass import CustomGraphPass

        class Wrong(CustomGraphPass):
            def __call__(self, graph):
                for node in graph.nodes:
                    if node.target is aten.rsqrt.default:
                        node.target = aten.reciprocal.default

            def uuid(self):
                return "wrong"

        config.post_grad_custom_post_pass = Wrong()
    elif kind == "lowering":
        good = lowerings[aten.erf.default]
        lowerings[aten.erf.default] = lambda a: lowering.mul(good(a), 1.01)
    elif kind == "alias":
        decompose(aten.select_scatter.default, lambda a, source, dim, index: a.clone())
    elif kind == "shape":
        lowerings[aten.mean.dim] = lambda a, axis, keepdim=False, dtype=None: lowering.div(
            lowering.sum_(a, axis, keepdim), 4
        )


class Mlp(nn.Module):
    def __init__(self, p: float):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)
        self.p, self.scale = p, 1.0

    def forward(self, x):
        h = F.gelu(self.norm(self.a(x)))
        if self.p:
            h = F.dropout(F.dropout(h, self.p) + 1, self.p)
        return self.b(h) * self.scale


class Rows(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        if self.kind == "alias":
            y = torch.sin(x)
            y[0].add_(1)
            return y * 2
        if self.kind == "shape":
            return (x * 2).mean(0)
        return torch.sin(x) * (2 if x.shape[0] > 5 else 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--inside", default="graphs")
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    plant(args.kind)
    from tensorprobe import Recorder

    torch.manual_seed(0)
    kind = args.kind
    rows = kind in ("alias", "shape", "branch")
    model = Rows(kind) if rows else Mlp(0.3 if kind in ("dropout", "seed", "healthy") else 0.0)
    options = {}
    if kind in ("guard", "branch"):
        options = {"options": {"guard_filter_fn": lambda guards: [False] * len(guards)}}
    if kind in ("shape", "branch"):
        options["dynamic"] = True
    run = model if args.eager else torch.compile(model, **options)
    inside = {} if args.eager else {"compiled": args.inside}
    recorder = None
    if args.output:
        recorder = Recorder(args.output, keep="tensors", **inside).start()
    for step, n_rows in enumerate((4, 6) if kind in ("shape", "branch") else (8, 8)):
        x = torch.linspace(-1, 1, n_rows * 16).reshape(n_rows, 16).requires_grad_(not rows)
        result = run(x)
        if not rows:
            F.mse_loss(result, torch.zeros_like(result)).backward()
            print(step, [float(p.grad.double().sum()) for p in model.parameters()])
            model.scale = 1.0 + step + (kind == "guard")
        print(step, result.detach().double().sum().item(), result.detach().flatten()[:3].tolist())
        if recorder is not None:
            recorder.step()
    if recorder is not None:
        recorder.close()
    from torch._dynamo.utils import counters

    if os.environ.get("COUNTERS"):
        print(
            {"graphs": counters["stats"]["unique_graphs"], "breaks": len(counters["graph_break"])}
        )


if __name__ == "__main__":
    main()
