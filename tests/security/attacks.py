"""The corpus: what an attacker writes into the fields of a call, each of it tried or thought of.

@M@ is the path of a marker that must not appear; see hostile_captures.py.
"""

# ruff: noqa: RUF001 letters that look like others are some of the attacks

from __future__ import annotations

from typing import Any

from hostile_captures import ANY_CONTENT, Attack, Line

SHELL = "touch @M@"
PYTHON = "open('@M@', 'w').close()"
EXPRESSION = "__import__('os').system('touch @M@')"
NO_SPACE = "open('@M@','w')"
TENSOR: Line = {
    "tensor": {
        "dtype": "float32",
        "shape": [3, 4],
        "device": "cpu",
        "grad": True,
        "value": ANY_CONTENT,
    }
}
_EVIL = {"weights_only": False}


def _op(op: str, *args: Any, **kwargs: Any) -> Attack:
    return Attack(f"op {op}", {"op": op, "args": list(args), "kwargs": kwargs})


def _fields(kind: str, type_: str, **values: Any) -> Attack:
    tree = {"fields": [kind, type_, values]}
    return Attack(f"{kind} {type_}", {"args": [tree]})


def _dict(**values: Any) -> Line:
    return {"dict": [[key, value] for key, value in values.items()]}


# A name that is followed from one attribute to the next

_HOMES = (
    "torch.nn.functional",
    "torch.nn.init",
    "torch.fft",
    "torch.special",
    "torch.sparse",
    "torch.nested",
    "torch.nested.F",
    "torch.signal.windows.windows",
    "torch.masked._ops",
    "torch.utils.data",
    "torch.ops",
    "torch",
)
WALKS = [
    *(_op(f"{home}.torch.os.system", SHELL) for home in _HOMES),
    *(_op(f"{home}.torch.builtins.exec", PYTHON) for home in _HOMES[:3]),
    _op("torch.nn.functional.torch.builtins.eval", EXPRESSION),
    _op("torch.nn.functional.torch.builtins.open", "@M@", "w"),
    _op("torch.nn.functional.torch.load", "@PICKLE@", **_EVIL),
    _op("torch.nn.functional.torch.serialization.load", "@PICKLE@", **_EVIL),
    _op("torch.nn.functional.torch.save", TENSOR, "@M@"),
    _op("torch.nn.functional.importlib.import_module", "@MODULE@"),
    _op("torch.nn.functional.dataclasses.builtins.exec", PYTHON),
    _op("torch.nn.functional.torch.os.mkdir", "@M@"),
    _op("torch.nn.functional.torch.os.open", "@M@", 0o101),
    _op("torch.nn.functional.torch.os.popen", SHELL),
    _op("torch.nn.functional.torch.os.execvp", "touch", ["touch", "@M@"]),
    _op("torch.nn.functional.torch.os.posix_spawnp", "touch", ["touch", "@M@"], _dict()),
    _op("torch.nn.functional.torch.os.remove", "@SECRET@"),
    _op("torch.nn.functional.torch.os._exit", 0),
    _op("torch.nn.functional.torch.sys.exit", 0),
    _op("torch.nn.functional.torch.hub.load", "@M@", "model", source="local"),
    _op("torch.nn.functional.torch.hub.download_url_to_file", "http://127.0.0.1:9/x", "@M@"),
    _op("torch.nn.functional.torch.hub.os.system", SHELL),
    _op("torch.nn.functional.torch.classes.load_library", "@M@.so"),
    _op("torch.nn.functional.torch.ops.load_library", "@M@.so"),
    _op("torch.nn.functional.torch.utils.cpp_extension.load_inline", "x", "int f(){return 0;}"),
    _op("torch.nn.functional.torch.utils.data.os.system", SHELL),
    _op("torch.nn.functional.torch.package.PackageImporter", "@PICKLE@"),
    _op("torch.nn.functional.torch.jit.load", "@PICKLE@"),
    _op("torch.nn.functional.torch.jit.CompilationUnit", "def f(x):\n  return x\n# @M@"),
    _op("torch.nn.functional.torch.multiprocessing.spawn", "f"),
    _op("torch.nn.functional.torch.distributed.FileStore", "@M@", 1),
    _op(
        "torch.nn.functional.torch.distributed.init_process_group",
        "gloo",
        init_method="file://@M@",
        rank=0,
        world_size=1,
    ),
    _op("torch.nn.functional.torch.fx.graph_module._exec_with_source", PYTHON, _dict()),
    _op("torch.nn.functional.torch._utils.importlib.import_module", "@MODULE@"),
    _op("torch.nn.functional.torch._inductor.codecache.PyCodeCache.load", PYTHON),
    _op("torch.nn.functional.torch.UntypedStorage.from_file", "@M@", True, 64),
    _op("torch.nn.functional.warnings.sys.modules.get", "os"),
    _op("torch.nn.functional.boolean_dispatch", SHELL),
    _op("torch.nn.functional.__builtins__.get", "exec"),
    _op("torch.nn.functional.__loader__.get_data", "@SECRET@"),
    _op("torch.nn.functional.__loader__.set_data", "@M@", "x"),
    _op("torch.nn.functional.__spec__.loader.set_data", "@M@", "x"),
    _op("torch.Tensor.backward.__globals__.get", "os"),
    _op("torch.Tensor.__class__.__subclasses__", TENSOR),
    _op("torch.Tensor.__class__.mro", TENSOR),
    _op("torch.Tensor.__init_subclass__"),
    _op("torch.Tensor.__torch_function__", {"special": ["function", "os.system"]}, [], [SHELL]),
    _op("tqdm.utils.os.system", SHELL),
    _op("numpy.os.system", SHELL),
    _op("numpy.load", "@PICKLE@", allow_pickle=True),
    _op("numpy.lib.npyio.DataSource", "@M@"),
    _op("msgspec.json.sys.modules.get", "os"),
    _op("yaml.unsafe_load", f"!!python/object/apply:os.system ['{SHELL}']"),
    _op("sympy.sympify", EXPRESSION),
    _op("sympy.parsing.sympy_parser.parse_expr", EXPRESSION),
    _op("mpmath.libmp.backend.exec_", PYTHON, _dict()),
    _op("transformers.pipeline", "@M@"),
    _op("__main__.os.system", SHELL),
    _op("traps.os.system", SHELL),
    _op("warm_python.subprocess.run", ["touch", "@M@"]),
    _op("tensorprobe.replay.repro.subprocess.run", ["touch", "@M@"]),
    _op("tensorprobe.checking.pool.subprocess.run", ["touch", "@M@"]),
    _op("@MODULE@.f", SHELL),
    _op("@MODULE@.os.system", SHELL),
    _op("torch_npu.os.system", SHELL),
    _op("torch_npu.torch.os.system", SHELL),
    _op("torch_npu.npu.os.system", SHELL),
    _op("torch.ops.npu.os.system.default", SHELL),
    _op("os.system", SHELL),
    _op("subprocess.run", ["touch", "@M@"]),
    _op("builtins.exec", PYTHON),
    _op("posix.system", SHELL),
]

# Functions of torch that do more than compute

ENTRIES = [
    _op("torch.load", "@PICKLE@", **_EVIL),
    _op("torch.save", TENSOR, "@M@"),
    _op("torch.from_file", "@M@", True, 64),
    _op("torch.Tensor.from_file", "@M@", True, 64),
    _op("torch.ops.aten.from_file", "@M@", True, 64),
    _op("torch.ops.aten.from_file.default", "@M@", True, 64),
    _op("torch.ops.aten.from_file.out", "@M@", True, 64, out=TENSOR),
    _op("torch.ops.aten.save", TENSOR, "@M@"),
    _op("torch.ops.aten.save.default", TENSOR, "@M@"),
    _op("torch.ops.debugprims.load_tensor.default", "@M@", [1], [1]),
    _op("torch.ops.prim.Print", "@M@"),
    _op("torch.ops.aten.warn.default", "@M@"),
    _op("torch.ops.load_library", "@M@.so"),
    _op("torch.ops.import_module", "@MODULE@"),
    _op("torch.classes.load_library", "@M@.so"),
    _op("torch.ops.higher_order.wrap", {"special": ["function", "os.system"]}, SHELL),
    _op("torch.ops.higher_order.cond", True, SHELL, SHELL, []),
    _op("torch.ops.c10d.broadcast_.default", [TENSOR], "@M@", 0, 0),
    _op("torch.ops._c10d_functional.all_reduce.default", TENSOR, "sum", "@M@"),
    _op("torch.ops.symm_mem._rendezvous.default", TENSOR, "@M@"),
    _op("torch.ops.profiler._record_function_enter_new.default", "@M@"),
    _op("torch.ops.rpc.x.default", "@M@"),
    _op("torch.ops.aten.__class__", "@M@"),
    _op("torch.ops.aten.relu.__class__", SHELL),
    _op("torch.ops.aten.relu.default._op", SHELL),
    _op("torch.ops.aten.relu.default.py_impl", "CPU"),
    _op("torch.ops.aten.relu.default.redispatch", SHELL),
    _op("torch._import_dotted_name", "@MODULE@"),
    _op("torch._preload_cuda_lib", "@M@", "x.so"),
    _op("torch.PyTorchFileWriter", "@M@"),
    _op("torch.PyTorchFileReader", "@SECRET@"),
    _op("torch.ScriptModuleSerializer", "@M@"),
    _op("torch.CompilationUnit", "def f(x):\n  return x\n# @M@"),
    _op("torch.parse_ir", "graph(%x):\n  return (%x) # @M@"),
    _op("torch.import_ir_module", "@M@", "@PICKLE@"),
    _op("torch.import_ir_module_from_buffer", "@M@", "x"),
    _op("torch.compile", {"special": ["function", "os.system"]}),
    _op("torch.fork", {"special": ["function", "os.system"]}, SHELL),
    _op("torch.vmap", {"special": ["function", "os.system"]}),
    _op("torch.hub.load", "@M@", "model", source="local"),
    _op("torch.hub.load_state_dict_from_url", "http://127.0.0.1:9/@M@"),
    _op("torch.jit.load", "@PICKLE@"),
    _op("torch.jit.script", EXPRESSION),
    _op("torch.package.PackageImporter", "@PICKLE@"),
    _op("torch.export.load", "@PICKLE@"),
    _op("torch.utils.cpp_extension.load_inline", "x", "int f(){return 0;}"),
    _op("torch.utils.cpp_extension.load", "x", ["@M@.cpp"]),
    _op("torch.utils.data.DataLoader", [1], num_workers=2),
    _op("torch.multiprocessing.spawn", {"special": ["function", "os.system"]}),
    _op("torch.distributed.init_process_group", "gloo", init_method="file://@M@"),
    _op("torch.distributed.TCPStore", "127.0.0.1", 29599, is_master=True),
    _op("torch.distributed.FileStore", "@M@", 1),
    _op("torch.distributed.rpc.init_rpc", "x", rank=0, world_size=1),
    _op("torch.prepare_multiprocessing_environment", "@M@"),
    _op("torch.set_default_device", "meta"),
    _op("torch.set_default_dtype", {"special": ["dtype", "torch.float16"]}),
    _op("torch.set_num_threads", 1_000_000),
    _op("torch.nn.Module.register_forward_hook", TENSOR, {"special": ["function", "os.system"]}),
    _op("torch.Tensor.apply_", TENSOR, {"special": ["layout", "torch.os.system"]}),
    _op("torch.Tensor.apply_", TENSOR, {"special": ["layout", "torch._import_dotted_name"]}),
    _op("torch.Tensor.map_", TENSOR, TENSOR, {"special": ["memory_format", "torch.add"]}),
    _op("torch.Tensor.register_hook", TENSOR, {"special": ["layout", "torch.load"]}),
    _op("torch.Tensor.__reduce_ex__", TENSOR, 2),
    _op("torch.Tensor.__setstate__", TENSOR, {"tuple": [SHELL, 1, 2, 3]}),
    _op("torch.Tensor.__deepcopy__", TENSOR, _dict()),
    _op("torch.Tensor.numpy", TENSOR),
    _op("torch.Tensor.numpy.tofile", TENSOR, "@M@"),
    _op("torch.Tensor.__dlpack__", TENSOR),
    _op("torch.Tensor.set_", TENSOR, TENSOR),
    _op("torch.Tensor.resize_", TENSOR, [1 << 40]),
    _op("torch.Tensor.share_memory_", TENSOR),
    _op("torch.Tensor.__class__", SHELL),
    _op("torch.Tensor.__getattribute__", TENSOR, "__class__"),
    _op("torch.Tensor.__setattr__", TENSOR, "data", SHELL),
    _op("torch.Tensor.__format__", TENSOR, "{0.__class__}"),
    _op("torch.empty", 10**15),
    _op("torch.zeros", 1 << 35),
    _op("torch.ones", [1 << 20, 1 << 20]),
    _op("torch.arange", 10**13),
    _op("torch.eye", 10**7),
    _op("torch.nn.functional.one_hot", TENSOR, 10**12),
    _op("torch.Tensor.repeat", TENSOR, [10**6, 10**6]),
    _op("torch.einsum", "@M@", TENSOR),
    _op("torch.set_default_tensor_type", "@MODULE@.X"),
    _op("torch.Tensor.type", TENSOR, "@MODULE@.X"),
    _op("torch.Tensor.type", TENSOR, {"special": ["function", "os.system"]}),
    _op("torch.Tensor.__array__", TENSOR, "O"),
    _op("torch.Tensor.module_load", TENSOR, TENSOR),
    _op(
        "torch.Tensor.register_post_accumulate_grad_hook",
        TENSOR,
        {"special": ["layout", "torch.load"]},
    ),
    _op(
        "torch.nn.functional.handle_torch_function",
        {"special": ["layout", "torch.load"]},
        [],
        SHELL,
    ),
    _op(
        "torch.nn.functional.triplet_margin_with_distance_loss",
        *(TENSOR, TENSOR, TENSOR),
        distance_function={"special": ["layout", "torch.load"]},
    ),
    _op("torch.overrides.handle_torch_function", SHELL),
    _op("torch.ops.aten.mul.left_t", [1], 10**11),
    _op("torch.ops.prim.rangelist.default", 10**11),
    _op("torch.ops.aten.manual_seed", 7),
    _op("torch.ops.aten._sparse_coo_tensor_unsafe.default", TENSOR, TENSOR, [10**6, 10**6]),
    _op("torch.nn.functional.interpolate", TENSOR, size=[10**6, 10**6]),
    _op("torch.cartesian_prod", *[TENSOR] * 9),
]

# A class that is named as the type of an argument

TYPES = [
    _fields("namedtuple", "subprocess.Popen", args=["touch", "@M@"]),
    _fields("dataclass", "subprocess.Popen", args=["touch", "@M@"]),
    _fields("mapping", "subprocess.Popen", args=["touch", "@M@"]),
    _fields("anything", "subprocess.Popen", args=["touch", "@M@"]),
    _fields("namedtuple", "subprocess.run", args=["touch", "@M@"]),
    _fields("namedtuple", "os.system", command=SHELL),
    _fields("namedtuple", "posix.system", command=SHELL),
    _fields("namedtuple", "posix.mkdir", path="@M@"),
    _fields("namedtuple", "builtins.open", file="@M@", mode="w"),
    _fields("namedtuple", "io.open", file="@M@", mode="w"),
    _fields("namedtuple", "importlib.import_module", name="@MODULE@"),
    _fields("namedtuple", "runpy.run_path", path_name="@MODULE@.py"),
    _fields("namedtuple", "torch.load", f="@PICKLE@", weights_only=False),
    _fields("namedtuple", "torch.serialization.load", f="@PICKLE@", weights_only=False),
    _fields("dataclass", "torch.save", obj=SHELL, f="@M@"),
    _fields("dataclass", "zipfile.ZipFile", file="@M@", mode="w"),
    _fields("dataclass", "logging.FileHandler", filename="@M@"),
    _fields("dataclass", "shutil.copyfile", src="@SECRET@", dst="@M@"),
    _fields("dataclass", "shutil.rmtree", path="@SECRET@"),
    _fields("dataclass", "pathlib.Path", args="@M@"),
    _fields("dataclass", "collections.namedtuple", typename="X", field_names="@M@"),
    _fields("dataclass", "dataclasses.make_dataclass", cls_name="X", fields=["@M@"]),
    _fields("dataclass", "torch._utils._import_dotted_name", name="@MODULE@"),
    _fields("dataclass", "torch.distributed.FileStore", file_name="@M@", world_size=1),
    _fields("dataclass", "@MODULE@.X", x=1),
    _fields("namedtuple", "torch.return_types.max", values=TENSOR, indices=EXPRESSION),
    _fields("dataclass", "__main__.X", x=1),
    _fields("dataclass", "", x=1),
    _fields("dataclass", "." * 400, x=1),
    Attack(
        "a class deep in an argument",
        {
            "kwargs": {
                "x": [
                    {
                        "tuple": [
                            _dict(k={"fields": ["namedtuple", "os.system", {"command": SHELL}]})
                        ]
                    }
                ]
            }
        },
    ),
    Attack(
        "a class in a slice",
        {"args": [{"slice": [{"fields": ["namedtuple", "os.system", {"command": SHELL}]}, 1, 1]}]},
    ),
    Attack(
        "a class in the output",
        {},
        {"outputs": {"fields": ["namedtuple", "os.system", {"command": SHELL}]}},
    ),
    *(
        Attack(f"special {kind} {text}", {"args": [TENSOR, {"special": [kind, text]}]})
        for kind, text in [
            ("dtype", "torch.os"),
            ("dtype", EXPRESSION),
            ("dtype", "torch.load"),
            ("dtype", "torch.float32\n" + EXPRESSION),
            ("layout", "torch.load"),
            ("layout", f"torch.strided or {EXPRESSION}"),
            ("memory_format", "torch.os.system"),
            ("memory_format", "torch.ｏs"),
            ("device", EXPRESSION),
            ("generator", EXPRESSION),
            ("numpy", f"1 if {EXPRESSION} else 1."),
            ("numpy", "1e999999999"),
            ("numpy", "1" * 5000),
            ("enum", EXPRESSION),
            ("function", "os.system"),
            ("module", "os"),
            ("storage", "@M@"),
            ("process_group", "file://@M@"),
            ("reduce_op", EXPRESSION),
            ("unsupported", EXPRESSION),
            ("{0.__class__}", "{0.__class__.__mro__}%(x)s%n"),
        ]
    ),
]

# A module, made again from notes

_LINEAR = "torch.nn.modules.linear.Linear"
_SEQUENTIAL = "torch.nn.modules.container.Sequential"


def _made_as(name: str, text: str, op: str = _LINEAR, **call: Any) -> Attack:
    note = f"made as {op.rpartition('.')[2]}{text}"
    return Attack(f"made as: {name}", {"op": op, **call}, {"notes": [note]}, "module")


def _made_with(
    name: str, attributes: str = "{}", children: str = "{}", rest: str = "[]", **call: Any
) -> Attack:
    op = call.setdefault("op", _SEQUENTIAL)
    note = f"made with {op}({attributes}, {children}, {rest})"
    return Attack(f"made with: {name}", call, {"notes": [note]}, "made")


MODULES = [
    _made_as("a call of the call", f"({EXPRESSION})()"),
    _made_as("an argument", f"({EXPRESSION})"),
    _made_as("a keyword", f"(in_features={EXPRESSION})"),
    _made_as("two stars", f"(4, 4, **{{'bias': {EXPRESSION}}})"),
    _made_as("two stars, called", f"(**{EXPRESSION})"),
    _made_as("one star", f"(*[{EXPRESSION}])"),
    _made_as("an attribute", f"(4, 4).forward({EXPRESSION})()"),
    _made_as("an operator", f"(4, 4) or {EXPRESSION}"),
    _made_as("a second line", f"(4, 4)\n    {EXPRESSION}"),
    _made_as("a second statement", f"(4, 4); {EXPRESSION}"),
    _made_as("a condition", f"(4, 4) if {EXPRESSION} else (4)()"),
    _made_as("a lambda", f"(4, 4)(lambda: {EXPRESSION})()"),
    _made_as("a comment", f"(4, 4) # {EXPRESSION}"),
    _made_as("a walrus", f"((x := {EXPRESSION}))()"),
    _made_as("a generator", f"(*(x for x in [{EXPRESSION}]))"),
    _made_as("f-string", "(f'{" + EXPRESSION.replace("'", '"') + "}')"),
    _made_as("deep minus signs", f"({'-' * 5000}1)"),
    _made_as("deep brackets", f"({'[' * 150}{']' * 150})"),
    _made_as("very long", f"({'1,' * 100_000})"),
    _made_as("a NUL", "(4\0, 4)"),
    _made_as("no brackets", ""),
    _made_as("large", "(in_features=10000000, out_features=10000000)"),
    _made_as("negative", "(in_features=-1, out_features=4)"),
    _made_as("a dtype as text", "(4, 4, dtype='torch.load')"),
    _made_as("a device", "(4, 4, device='@M@')"),
    _made_as("Transformer", f"(activation='{EXPRESSION[:10]}')", "torch.nn.Transformer"),
    _made_as("Embedding", "(1000000000000, 1000)", "torch.nn.modules.sparse.Embedding"),
    _made_as("ModuleList", "(['os.system'])", "torch.nn.modules.container.ModuleList"),
    _made_as("DataParallel", "('os')", "torch.nn.parallel.data_parallel.DataParallel"),
    _made_as("a distance", "(distance_function='os.system')",
             "torch.nn.modules.loss.TripletMarginWithDistanceLoss"),
    _made_as("ParameterList", "([1] * 10**11)", "torch.nn.modules.container.ParameterList"),
    _made_as("LazyLinear", "(10**13)", "torch.nn.modules.linear.LazyLinear"),
    _made_as("ScriptModule", "('@PICKLE@')", "torch.jit.RecursiveScriptModule"),
    _made_as("GraphModule", "({}, '@M@')", "torch.fx.graph_module.GraphModule"),
    _made_as("GraphModule, hidden", "()", "torch.fx.GraphModule"),
    _made_as("RemoteModule", "('x', 'y')", "torch.distributed.nn.RemoteModule"),
    _made_as("a class of transformers", "()", "transformers.PreTrainedModel"),
    _made_as("a class of a foreign module", "()", "@MODULE@.Block"),
    _made_as("a class of the program", "()", "hostile_captures.Block"),
    _made_as("a class of main", "()", "__main__.Block"),
    _made_as("Popen", "(['touch', '@M@'])", "subprocess.Popen"),
    _made_as("a walk", "('touch @M@')", "torch.nn.functional.torch.os.system"),
    _made_as("a walk from nn", "('touch @M@')", "torch.nn.modules.torch.os.system"),
    _made_as("a walk from a module", "('touch @M@')", "torch.nn.modules.linear.torch.os.system"),
    _made_as("Module itself", "()", "torch.nn.modules.module.Module"),
    _made_as("a look-alike", "('touch @M@')", "oｓ.system"),
    _made_as("a look-alike of torch", "('touch @M@')", "torch.nn.functional.torch.oｓ.system"),
    _made_with("a key", f"{{{EXPRESSION}: 1}}"),
    _made_with("a value", f"{{'a': {EXPRESSION}}}"),
    _made_with("two stars", f"{{**{EXPRESSION}}}"),
    _made_with("two stars of a name", "{**torch.nn.functional.torch.os.environ}"),
    _made_with("a comprehension", f"{{x: {EXPRESSION} for x in [1]}}"),
    _made_with("a name of a function", "{'a': torch.serialization.load}"),
    _made_with("forward is load", "{'forward': torch.serialization.load}", args=["@PICKLE@"],
               kwargs=_EVIL),
    _made_with("forward imports", "{'forward': torch._utils._import_dotted_name}",
               args=["@MODULE@.x"], kwargs={}),
    _made_with("forward is import_module", "{'forward': importlib.import_module}",
               args=["@MODULE@"], kwargs={}),
    _made_with("forward walks", "{'forward': torch.nn.functional.torch.os.system}", args=[SHELL],
               kwargs={}),
    _made_with("forward of a look-alike", "{'forward': oｓ.system}", args=[SHELL], kwargs={}),
    _made_with("hooks", "{'_forward_pre_hooks': torch.serialization.load}"),
    _made_with("_call_impl", "{'_call_impl': torch.serialization.load}", args=["@PICKLE@"],
               kwargs=_EVIL),
    _made_with("__class__", "{'__class__': torch.fx.GraphModule}"),
    _made_with("_modules", "{'_modules': torch.serialization.load}"),
    _made_with("children by expression", "{}", EXPRESSION),
    _made_with("the name of a child", "{}",
               repr({f'": {EXPRESSION}, "x': "torch.nn.modules.linear.Linear"})),
    _made_with("the name of a child, a line", "{}", repr({f'a\n"+{EXPRESSION}+"': None})),
    _made_with("the kind of a list", "{}", repr({"x": {"": EXPRESSION, "0": None}})),
    _made_with("the kind of a list imports", "{}", repr({"x": {"": "@MODULE@.X", "0": None}})),
    _made_with("the kind of a list, a line", "{}",
               repr({"x": {"": f"os\n    {EXPRESSION}\n    x.y"}})),
    _made_with("the kind of a list, a condition", "{}",
               repr({"x": {"": f"torch.nn.Module if {EXPRESSION} else torch.nn.Module"}})),
    _made_with("no kind of a list", "{}", repr({"x": {"0": None}})),
    _made_with("a child made as", "{}", repr({"x": f"made as X({EXPRESSION})()"})),
    _made_with("a child made as, stars", "{}", repr({"x": f"made as X(**{EXPRESSION})"})),
    _made_with("a number for a child", "{}", "{'x': 7}"),
    _made_with("a list for children", "{}", "['x']"),
    _made_with("a deep child", "{}", "{'x': " * 90 + "None" + "}" * 90),
    _made_with("what is unknown", "{}", "{}", EXPRESSION),
    _made_with("what is unknown is a number", "{}", "{}", "7"),
    _made_with("too few", "{}", "{}", "[]), ({}"),
    _made_with("a package", op="@MODULE@.Block"),
    _made_with("a package in the way", op="pytest.__main__.Block"),
    _made_with("a package that runs", op="tqdm.__main__.Block"),
    _made_with("the program", op="hostile_captures.Block"),
    _made_with("a look-alike package", op="antigravitｙ.Block"),
    _made_with("a keyword of Python", op="torch.nn.lambda.Block"),
    _made_with("GraphModule", "{'_code': '" + EXPRESSION.replace("'", '"') + "'}",
               op="torch.fx.graph_module.GraphModule"),
    _made_with("ScriptModule", "{'_c': torch.jit.load}", op="torch.jit._script.ScriptModule"),
]  # fmt: skip

# Text that becomes part of a script, a table, a file name

BREAKS = {
    "quotes": f'"""\n{EXPRESSION}\n"""',
    "single quotes": f"'''\n{EXPRESSION}\n'''",
    "a quote": f'"+{EXPRESSION}+"',
    "a backslash": f'\\"+{EXPRESSION}+"',
    "an ending backslash": "x\\",
    "an ending quote": 'x"',
    "a line": f"x\n{EXPRESSION}\n",
    "a carriage return": f"x\r{EXPRESSION}\r",
    "a form feed": f"x\x0c{EXPRESSION}\x0c",
    "U+2028": f"x\u2028{EXPRESSION}\u2028",
    "U+0085": f"x\x85{EXPRESSION}\x85",
    "a NUL": f"x\0{EXPRESSION}",
    "a line continued": f"x\\\n{EXPRESSION}",
    "a comment": f"x # {EXPRESSION}",
    "a bracket": f'x"): {EXPRESSION}, ("',
    "a format": "{0.__class__.__mro__[1].__subclasses__}{}{x!r:>{99999999}}%(x)s%s%n%999999999d",
    "a template": "${x}$(touch @M@)`touch @M@`#{x}{{x}}",
    "an f-string": f"{{{EXPRESSION}}}",
    "a path": "../../../../../../../../@M@",
    "a path upwards": "../tpmarker-up",
    "an absolute path": "@M@",
    "a home": "~/tpmarker",
    "a null device": "CON:/dev/stdout",
    "zero width": "re\u200blu\u200d\ufeff",
    "right to left": "\u202e\u2066relu",
    "full width": "ｒｅｌｕ",
    "a lone surrogate": "x\ud800",
    "an astral sign": "\U0001f4a5" * 20,
    "an escape": "\x1b]0;x\x07\x1b[2J",
    "very long": "x" * 100_000,
    "many dots": "." * 10_000,
    "empty": "",
    "an option": "--output=@M@",
    "yaml": f"!!python/object/apply:os.system ['{SHELL}']",
    "a formula": "=cmd|'/c touch @M@'!A1",
    "shell": "'; touch @M@; '",
    "markup": "[/red][link=file://@M@]x[/link]",
}


def _output_dict(text: str) -> Line:
    return {"outputs": {"dict": [[text, TENSOR]]}}


_PLACES: dict[str, Any] = {
    "name": lambda text: ({"name": f"Functional.{text}.0.forward"}, {}),
    "whole name": lambda text: ({"name": text}, {}),
    "op": lambda text: ({"op": text}, {}),
    "end of op": lambda text: ({"op": f"torch.nn.functional.{text}"}, {}),
    "module": lambda text: ({"module": text}, {}),
    "thread": lambda text: ({"thread": text}, {}),
    "parent": lambda text: ({"parent": text}, {}),
    "keyword": lambda text: ({"kwargs": {text: 1}}, {}),
    "text argument": lambda text: ({"args": [TENSOR, text]}, {}),
    "key of an argument": lambda text: ({"args": [TENSOR, {"dict": [[text, 1]]}]}, {}),
    "key of an output": lambda text: ({}, _output_dict(text)),
    "note": lambda text: ({"notes": [text]}, {}),
    "autocast": lambda text: ({"notes": [f"autocast cpu {text}"]}, {}),
    "compiled": lambda text: ({"notes": [f"outputs are the arguments{text}"]}, _output_dict(text)),
    "error": lambda text: ({}, {"status": "raised", "error": text}),
    "dtype": lambda text: ({"args": [_tensor(dtype=text)]}, {}),
    "device": lambda text: ({"args": [_tensor(device=text)]}, {}),
    "same": lambda text: ({"args": [TENSOR, _tensor(same=text)]}, {}),
    "gap": lambda text: ({"args": [_tensor(gap=text, value=None)]}, {}),
    "buffer": lambda text: ({"buffers": {text: _tensor()["tensor"]}}, {}),
    "parameter": lambda text: ({"parameters": {text: _tensor()["tensor"]}}, {}),
}


def _tensor(**fields: Any) -> Line:
    return {"tensor": {**TENSOR["tensor"], **fields}}


TEXTS = [
    Attack(f"{place}: {what}", *fields(text))
    for place, fields in _PLACES.items()
    for what, text in BREAKS.items()
]


def _look_alike(name: str, op: str) -> Attack:
    return Attack(f"op: {name}", {"op": op, "args": [SHELL], "kwargs": {}})


NO_SPACES = [
    Attack("autocast without a space", {"notes": [f"autocast cpu {NO_SPACE}"]}),
    Attack("autocast of a function", {"notes": ["autocast cpu torch.load"]}),
    Attack("autocast of nothing", {"notes": ["autocast "]}),
    Attack("key of an output, code", {}, _output_dict(f'": {EXPRESSION}, "')),
    Attack("key of an output, closing", {}, _output_dict(f'": 1}}\n{EXPRESSION}\nx = {{"')),
    _look_alike("a look-alike of os", "oｓ.system"),
    _look_alike("a look-alike inside", "torch.nn.functional.torch.oｓ.system"),
    Attack("op: a look-alike package", {"op": "antigravitｙ.x", "args": []}),
    Attack("op: Cyrillic", {"op": "tоrch.nn.functional.relu"}),
    _look_alike("a mathematical letter", "torch.nn.functional.𝓽orch.os.system"),
    _look_alike("a ligature", "torch.nn.functional.torch.hub.ﬁle"),
    Attack("op: zero width", {"op": "torch.nn.functional.re\u200blu"}),
    Attack("op: a dunder", {"op": "torch.Tensor.__getitem__", "args": [TENSOR, EXPRESSION]}),
    Attack("op: a getter", {"op": f"torch.Tensor.{NO_SPACE}.__get__"}),
    Attack("op: two calls", {"op": f"torch.nn.functional.relu({EXPRESSION})"}),
    Attack("keyword: a look-alike", {"kwargs": {"ｉnplace": False}}),
    Attack("keyword: of Python", {"kwargs": {"lambda": 1, "None": 2}}),
    Attack("keyword: self", {"kwargs": {"self": 1, "__class__": 2}}),
    Attack("strides that cannot be", {"args": [_tensor(stride=[-4, 1])]}),
    Attack("strides that reach far", {"args": [_tensor(stride=[1 << 40, 1])]}),
    Attack("strides of another length", {"args": [_tensor(stride=[1])]}),
    Attack("a shape that cannot be", {"args": [_tensor(shape=[-3, 4])]}),
    Attack("a shape of another content", {"args": [_tensor(shape=[1 << 50, 4])]}),
    Attack("a shape of many sides", {"args": [_tensor(shape=[1] * 1000)]}),
    Attack("a dtype that is none", {"args": [_tensor(dtype="load")]}),
    Attack("a dtype that runs", {"args": [_tensor(dtype="os.system")]}),
    *(
        Attack(f"a dtype of numpy: {name}", {"args": [_tensor(dtype=name)]})
        for name in ("object", "O", "O8", "i4,O", "V8", "S4", "U99", "complex", "float", "str",
                     "datetime64[ns]", "(1000000,1000000)f4", "f4,f4", ">f4", "void", "int", "m8")
    ),
    Attack("a value that is not there", {"args": [_tensor(value=999_999)]}),
    Attack("a huge integer", {"args": [TENSOR, {"int": "9" * 100_000}]}),
    Attack("a float of words", {"args": [TENSOR, {"float": EXPRESSION}]}),
    Attack("a complex of words", {"args": [TENSOR, {"complex": ["1", EXPRESSION]}]}),
    Attack("a slice of words", {"args": [TENSOR, {"slice": [EXPRESSION, "a", "b"]}]}),
    Attack("an unknown tree", {"args": [TENSOR, {EXPRESSION: [1]}]}),
    Attack("a tree of two keys", {"args": [TENSOR, {"tuple": [], "dict": []}]}),
    Attack("a dict with a list as key", {"args": [TENSOR, {"dict": [[[1], 2]]}]}),
    Attack("a dict with a tensor as key", {"args": [TENSOR, {"dict": [[TENSOR, 2]]}]}),
    Attack("a deep argument", {"args": [TENSOR, [[[[[[[[[[[[[[[[EXPRESSION]]]]]]]]]]]]]]]]]}),
]  # fmt: skip


def everywhere(what: str) -> Attack:
    """One of these texts in all places that leave the call a call of relu."""
    call: Line = {}
    end: Line = {}
    for place in ("name", "module", "thread", "key of an output", "note", "error", "buffer"):
        begun, ended = _PLACES[place](BREAKS[what])
        call |= begun
        end |= ended
    return Attack(f"everywhere: {what}", call, {**end, "status": "complete"})


EVERYWHERE = [everywhere(what) for what in BREAKS if what != "very long"]
ALL = [*WALKS, *ENTRIES, *TYPES, *MODULES, *NO_SPACES, *TEXTS]
