"""Programs with a fault planted into torch.compile: python compile_programs.py KIND [--eager]."""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn

KINDS = (
    "healthy", "decomposition", "backward", "dropout", "seed", "passes", "lowering", "alias",
    "shape", "guard", "branch", "no copy", "lost write", "uniform", "kernel numbers", "gradient",
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
    elif kind == "no copy":  # inductor forgets what is written to an input
        import torch._inductor.config as config
        from torch._inductor.custom_graph_pass import CustomGraphPass

        class NoCopy(CustomGraphPass):
            def __call__(self, graph):
                for node in list(graph.nodes):
                    if node.target is aten.copy_.default:
                        graph.erase_node(node)

            def uuid(self):
                return "no copy"

        config.post_grad_custom_post_pass = NoCopy()
    elif kind == "lost write":  # functionalisation forgets it
        from torch._functorch._aot_autograd import collect_metadata_analysis

        collect_metadata_analysis.has_data_mutation = lambda tensor: False
    elif kind == "uniform":
        decompose(aten.rand_like.default, lambda x, **options: torch.rand(x.shape) * 2)
    elif kind == "kernel numbers":
        op = torch.ops.prims.inductor_random.default
        good = lowerings[op]
        lowerings[op] = lambda *args, offset=0: good(*args, offset=offset + 1)
    elif kind == "gradient":  # of the second of two blocks, in a sum that one index is in twice
        decompose(
            aten.embedding_dense_backward.default,
            lambda g, i, n, *_: g.new_zeros((n, g.shape[-1])).index_put((i,), g),
        )
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


class Statistics(nn.Module):
    """Writes to a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.mean


class Noise(nn.Module):
    def forward(self, x):
        return F.dropout(F.dropout(x + torch.rand_like(x), 0.5), 0.2)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(9, 16), nn.LayerNorm(16), nn.Linear(16, 9)

    def forward(self, x):
        ids = torch.arange(x.numel(), device=x.device).reshape(x.shape) % 7
        return self.head(F.silu(self.norm(self.words(ids) + x.mean())))


MODELS = {
    "no copy": Statistics, "lost write": Statistics, "uniform": Noise, "kernel numbers": Noise,
    "gradient": Words,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--clean", action="store_true", help="the same without the fault")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--inside", default="graphs")
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    plant("healthy" if args.clean else args.kind)
    from tensorprobe import Recorder

    torch.manual_seed(0)
    kind = args.kind
    rows = kind in ("alias", "shape", "branch", *MODELS) and kind != "gradient"
    if kind in MODELS:
        model = MODELS[kind]()
    else:
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
            if isinstance(model, Mlp):
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
