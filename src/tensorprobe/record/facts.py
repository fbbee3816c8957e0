"""What usually explains a difference: versions, devices, numeric switches and the command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tensorprobe._version import __version__

MASK = "***"

# By name, never the whole environment: what changes numbers, devices, threads or layouts.
ENVIRONMENT_VARIABLES = (
    # processes and threads
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE OMP_NUM_THREADS MKL_NUM_THREADS PYTHONHASHSEED "
    # CPU kernels
    "ATEN_CPU_CAPABILITY MKL_CBWR MKL_ENABLE_INSTRUCTIONS ONEDNN_DEFAULT_FPMATH_MODE "
    "ONEDNN_MAX_CPU_ISA DNNL_DEFAULT_FPMATH_MODE "
    # CUDA
    "CUDA_VISIBLE_DEVICES CUDA_LAUNCH_BLOCKING CUDA_DEVICE_MAX_CONNECTIONS CUDA_MODULE_LOADING "
    "CUBLAS_WORKSPACE_CONFIG CUBLASLT_WORKSPACE_SIZE NVIDIA_TF32_OVERRIDE "
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE TORCH_BLAS_PREFER_CUBLASLT TORCH_CUDNN_V8_API_DISABLED "
    "PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF NCCL_ALGO NCCL_PROTO NCCL_NVLS_ENABLE "
    "NCCL_P2P_DISABLE NVTE_FLASH_ATTN NVTE_FUSED_ATTN NVTE_ALLOW_NONDETERMINISTIC_ALGO "
    # compilers
    "TORCHDYNAMO_DISABLE TORCH_COMPILE_DISABLE PYTORCH_JIT TRITON_INTERPRET "
    # Ascend
    "ASCEND_HOME_PATH ASCEND_TOOLKIT_HOME ASCEND_OPP_PATH ASCEND_RT_VISIBLE_DEVICES "
    "ASCEND_LAUNCH_BLOCKING TASK_QUEUE_ENABLE COMBINED_ENABLE INF_NAN_MODE_ENABLE "
    "INF_NAN_MODE_FORCE_DISABLE NPU_ASD_ENABLE PYTORCH_NPU_ALLOC_CONF HCCL_ALGO "
    "HCCL_DETERMINISTIC LCCL_DETERMINISTIC CLOSE_MATMUL_K_SHIFT ATB_MATMUL_SHUFFLE_K_ENABLE "
    "ATB_LLM_LCOC_ENABLE"
)

# Their versions are noted when the program has imported them.
_PACKAGES = (
    "accelerate apex bitsandbytes deepspeed diffusers flash_attn ml_dtypes numpy peft safetensors "
    "torch torch_npu torchvision transformer_engine transformers triton xformers"
)

# What a question to a library, a driver file or a missing feature can end in. A fact that cannot
# be read is left out: the recording it describes goes on.
_UNREADABLE = (
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    Warning,  # where warnings are errors
)


def environment_facts() -> dict[str, Any]:
    """The facts of this process for capture.json, as plain JSON values.

    Reads only: no device is initialised, no flag, no random state is changed, and nothing is
    imported that the program has not imported itself. Without torch its facts are absent.
    """
    torch = sys.modules.get("torch")
    facts: dict[str, Any] = {
        "tensorprobe": __version__,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "command": mask_arguments(sys.orig_argv),
        "folder": os.getcwd(),
        "environment": {
            name: mask_value(name, os.environ[name])
            for name in ENVIRONMENT_VARIABLES.split()
            if name in os.environ
        },
        "packages": _package_versions(),
    }
    if torch is not None:
        facts["torch"] = _ask(torch, _TORCH)
        if not torch.version.cuda or torch.cuda.is_initialized():
            # It asks cuDNN for its version, which initialises CUDA for good.
            facts["torch"] |= _ask(torch, {"build": "__config__.show"})
        facts["numerics"] = {**_ask(torch, _NUMERICS), "autocast": _autocast_dtypes()}
        facts["seed"] = _ask(torch, {"torch": "initial_seed"})
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            facts["world_size"] = distributed.get_world_size()  # spawned ranks: no WORLD_SIZE
        devices = {"cuda": _cuda_facts(torch), "npu": _npu_facts(sys.modules.get("torch_npu"))}
        facts |= {name: found for name, found in devices.items() if found}
    return facts


def _read(questions: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """The answers that could be had, as JSON values."""
    answers: dict[str, Any] = {}
    for name, question in questions.items():
        try:
            answer = question()
        except _UNREADABLE:
            continue
        if answer is None or isinstance(answer, (bool, int, float, str, list, dict)):
            answers[name] = answer
        else:
            answers[name] = str(answer)
    return {name: answer for name, answer in answers.items() if answer is not None}


def _package_versions() -> dict[str, str]:
    return _read(
        {
            name: partial(importlib.metadata.version, name)
            for name in _PACKAGES.split()
            if name in sys.modules
        }
    )


_TORCH = {
    "version": "__version__",
    "git": "version.git_version",
    "debug": "version.debug",
    "cuda": "version.cuda",
    "hip": "version.hip",
    "cpu_capability": "backends.cpu.get_cpu_capability",
    "num_threads": "get_num_threads",
    "num_interop_threads": "get_num_interop_threads",
    "default_dtype": "get_default_dtype",
}
_NUMERICS = {
    "float32_matmul_precision": "get_float32_matmul_precision",
    "matmul_tf32": "backends.cuda.matmul.allow_tf32",
    "matmul_fp32_precision": "backends.cuda.matmul.fp32_precision",
    "fp16_reduced_precision_reduction": (
        "backends.cuda.matmul.allow_fp16_reduced_precision_reduction"
    ),
    "bf16_reduced_precision_reduction": (
        "backends.cuda.matmul.allow_bf16_reduced_precision_reduction"
    ),
    "fp16_accumulation": "backends.cuda.matmul.allow_fp16_accumulation",
    "cudnn_enabled": "backends.cudnn.enabled",
    "cudnn_benchmark": "backends.cudnn.benchmark",
    "cudnn_deterministic": "backends.cudnn.deterministic",
    "cudnn_tf32": "backends.cudnn.allow_tf32",
    "mkldnn_enabled": "backends.mkldnn.enabled",
    "mkldnn_fp32_precision": "backends.mkldnn.fp32_precision",
    "sdpa_flash": "backends.cuda.flash_sdp_enabled",
    "sdpa_mem_efficient": "backends.cuda.mem_efficient_sdp_enabled",
    "sdpa_math": "backends.cuda.math_sdp_enabled",
    "sdpa_cudnn": "backends.cuda.cudnn_sdp_enabled",
    "sdpa_math_reduced_precision": "backends.cuda.fp16_bf16_reduction_math_sdp_allowed",
    "deterministic_algorithms": "are_deterministic_algorithms_enabled",
    "deterministic_warn_only": "is_deterministic_algorithms_warn_only_enabled",
    "anomaly_detection": "is_anomaly_enabled",
    "grad_enabled": "is_grad_enabled",
    "inference_mode": "is_inference_mode_enabled",
}
_NPU = {
    "torch_npu": "__version__",
    "matmul_hf32": "npu.matmul.allow_hf32",
    "conv_hf32": "npu.conv.allow_hf32",
}
# Answered by a device that is in use; asking would otherwise initialise it, and for ever.
_CUDA_IN_USE = {
    "current_device": "current_device",
    "seed": "initial_seed",
}
_NPU_IN_USE = {
    "jit_compile_off": "npu.is_jit_compile_false",
    "inf_nan_mode": "npu.utils.is_support_inf_nan",
    "current_device": "npu.current_device",
    "seed": "npu.initial_seed",
}


def _ask(module: Any, paths: dict[str, str]) -> dict[str, Any]:
    """What lies at these dotted paths, called where it is a function."""

    def follow(path: str) -> Any:
        found = module
        for part in path.split("."):
            found = getattr(found, part)
        return found() if callable(found) else found

    return _read({name: partial(follow, path) for name, path in paths.items()})


def _autocast_dtypes() -> dict[str, str]:
    from tensorprobe.devices import autocast_dtypes  # imports torch, which is here already

    return {device: str(dtype) for device, dtype in autocast_dtypes().items()}


def _cuda_facts(torch: Any) -> dict[str, Any]:
    if not torch.version.cuda and not torch.version.hip:
        return {}
    cuda = torch.cuda
    facts = _read(
        {
            "runtime": lambda: torch.version.cuda or torch.version.hip,
            "nccl": lambda: ".".join(map(str, cuda.nccl.version())),
            "driver": _nvidia_driver,
            "devices": _nvidia_devices,
        }
    )
    if cuda.is_initialized():
        count = range(cuda.device_count())
        facts |= _ask(cuda, _CUDA_IN_USE)
        facts |= _read(
            {
                "devices": lambda: [cuda.get_device_name(index) for index in count],
                "cudnn": lambda: torch.backends.cudnn.version(),  # asking initialises CUDA
                "capability": lambda: [list(cuda.get_device_capability(index)) for index in count],
                "blas": lambda: torch.backends.cuda.preferred_blas_library(),
                "linalg": lambda: torch.backends.cuda.preferred_linalg_library(),
            }
        )
    return facts


def _nvidia_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text())
    return found[1] if found else None


def _nvidia_devices(folder: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    files = sorted(folder.glob("*/information"))
    models = [re.search(r"^Model:\s*(.+?)\s*$", file.read_text(), re.MULTILINE) for file in files]
    return [model[1] for model in models if model]


def _npu_facts(torch_npu: Any) -> dict[str, Any]:
    facts = _read({"cann": _cann_version, "driver": _npu_driver, "firmware": _npu_firmware})
    if torch_npu is None:
        return facts
    facts |= _ask(torch_npu, _NPU)
    if _ask(torch_npu, {"in_use": "npu.is_initialized"}).get("in_use"):
        npu = torch_npu.npu
        facts |= _ask(torch_npu, _NPU_IN_USE)
        facts |= _read(
            {"devices": lambda: [npu.get_device_name(d) for d in range(npu.device_count())]}
        )
        if "jit_compile_off" in facts:
            facts["jit_compile"] = not facts.pop("jit_compile_off")
    return facts


def _cann_version() -> str | None:
    """From the toolkit that the environment points to; its place differs between releases."""
    homes = [os.environ.get(name) for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")]
    for home in filter(None, [*homes, "/usr/local/Ascend/ascend-toolkit/latest"]):
        folder = Path(home)
        for file in (
            folder / "version.cfg",
            *sorted(folder.glob("*-linux/ascend_toolkit_install.info")),
            folder / "runtime/version.info",
            folder / "compiler/version.info",
            folder / "toolkit/version.info",
        ):
            version = _version_in(file)
            if version:
                return version
    return None


def _npu_driver() -> str | None:
    return _version_in(Path("/usr/local/Ascend/driver/version.info"))


def _npu_firmware() -> str | None:
    return _version_in(Path("/usr/local/Ascend/firmware/version.info"))


def _version_in(file: Path) -> str | None:
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return None
    # "Version=24.1.rc1", "version=8.0.RC1", or "[7.0.0.1:8.0.RC1]" behind a name in version.cfg
    found = re.search(r"^\s*version\s*=\s*(\S+)", text, re.IGNORECASE | re.MULTILINE)
    found = found or re.search(r"^\w+=\[[^:\]]*:([^\]]+)\]", text, re.MULTILINE)
    return found[1] if found else None


# Secrets: masked by the name they go by, by their looks, and in URLs.

_PLAIN_SECRETS = {
    *("secret", "password", "passwd", "passphrase", "pwd", "pass", "credential", "credentials"),
    *("apikey", "auth", "authorization", "bearer", "signature", "cookie", "key", "token"),
    *("secrets", "passwords", "apikeys", "cookies", "keys"),
}
# Alone they are names of data as well: of a weight of attention, or a column of a table.
_ALSO_DATA = {"key", "keys", "token", "pass", "signature"}
_SECRET_KEYS = re.compile(
    r"(?!api$|access$|private$|secret$|auth$|ssh$|account$|wandb$|license$).+"
)
# "sort-key", "eos-token" and the like are names of data and of vocabulary.
_OPEN_BEFORE = {
    "key": _SECRET_KEYS,
    "keys": _SECRET_KEYS,
    "token": re.compile(
        r"bos|eos|pad|unk|sep|cls|mask|special|stop|start|end|image|video|audio|prompt|per"
    ),
}
_LOOKS_SECRET = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[oprsu]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abeprs]-[\w-]{10,}|AKIA[0-9A-Z]{12,}|AIza[\w-]{20,}|npm_\w{20,}|pypi-[\w-]{20,}"
    r"|eyJ(?<![\w-]{203})[\w-]{8,}\.[\w-]+\.[\w-]+)|(?<=[Bb]earer )\S+|(?<=[?&]sig=)[^&\s\"']+"
)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
# A password may have an @, and a slash; `host:80/path@v2` is none.
_USER_IN_URL = re.compile(
    r"(?<=://)(?:[^/\s\"'?#]+(?=@)|[^\s/@:\"']+:(?!\d+/)[^\s\"'@]{0,200}(?=@))"
)
# Each run of letters is looked at once, as a text of megabytes without "=" must end as well.
_NAME = re.compile(r"(?<![\w.-])([\w.-]+)[\"']?\s*[=:]\s*([\"']?)")
_NO_LETTERS = re.compile(r"[^A-Za-z]+")
_VALUE = re.compile(r"(?:(?:Basic|Bearer|Digest|Token) +)?[^\s\"'&,;}]*")
_VALUES_IN_QUOTES = {
    quote: re.compile(rf"(?:\\.|[^{quote}\\])*", re.DOTALL) for quote in ('"', "'")
}
_HEADER = re.compile(r"authorization|cookie", re.IGNORECASE)
_REST_OF_HEADER = re.compile(r"[^\r\n\"']*")
_FLAG = re.compile(r"(?<![\w-])(--?[A-Za-z][\w-]*)(\s+)(\"[^\"]*\"|'[^']*'|[^\s-]\S*)")
_USER_FLAGS = ("-u", "--user", "--proxy-user")
_USER_AND_PASSWORD = re.compile(r"[\"']?[^\s:/\\\"']+:[^/\\\s]\S*")  # and no C:\path
_ASSIGNMENT = re.compile(r"(-{0,2}[A-Za-z][\w.-]*)=.+", re.DOTALL)


def mask_value(name: str, value: str) -> str:
    """The value, or a mask when its name or its looks say that it is a secret."""
    return MASK if value and _is_secret_name(name) else _mask_text(value)


def hides_all(name: str) -> bool:
    """Whether all that is in a mapping of this name is secret: `credentials`, but no `key`."""
    return _is_secret_name(name) and re.split(r"[^a-z]+", name.lower())[-1] not in _ALSO_DATA


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line without its secrets: `--api-key xxx`, `HF_TOKEN=xxx`, `https://me:xxx@host`."""
    return list(_masked(arguments))


def mask_items(items: Sequence[Any]) -> list[Any]:
    """A list without its secrets: a command line, or a pair of a name and a value."""
    if len(items) == 2 and isinstance(items[0], str) and isinstance(items[1], str):
        name = items[0]
        if hides_all(name) or (_is_secret_name(name) and len(re.findall(r"[A-Za-z]+", name)) > 1):
            return [name, MASK]
    if items and all(isinstance(each, str) for each in items):
        return mask_arguments(items)
    return list(items)


def _masked(arguments: Iterable[str]) -> Iterable[str]:
    hide_next = False
    before = ""
    for argument in arguments:
        flag = argument.startswith("-")
        is_user = before in _USER_FLAGS and _USER_AND_PASSWORD.fullmatch(argument)
        before = argument
        if is_user or (hide_next and not argument.startswith("--")):
            yield MASK
            hide_next = False
            continue
        hide_next = flag and "=" not in argument and _is_secret_name(argument)
        assignment = _ASSIGNMENT.fullmatch(argument)  # the value may have spaces: all of it goes
        if assignment and _is_secret_name(assignment[1]):
            yield f"{assignment[1]}={MASK}"
        else:
            yield _mask_text(argument)


def _mask_text(text: str) -> str:
    text = _PRIVATE_KEY.sub(MASK, text)
    text = _USER_IN_URL.sub(MASK, text)
    text = _LOOKS_SECRET.sub(MASK, text)
    text = _FLAG.sub(_masked_flag, text)
    shown, end = "", 0
    for name in _NAME.finditer(text):
        if name.start() >= end and _is_secret_name(name[1]):
            value = _value_after(name).match(text, name.end())
            shown += text[end : name.end()] + MASK
            end = value.end() if value else name.end()
    return shown + text[end:]


def _value_after(name: re.Match[str]) -> re.Pattern[str]:
    """What the value of a name looks like: in quotes, of a header, or one word."""
    if name[2]:
        return _VALUES_IN_QUOTES[name[2]]
    return _REST_OF_HEADER if _HEADER.search(name[1]) else _VALUE


def _masked_flag(found: re.Match[str]) -> str:
    flag, space, value = found.groups()
    is_user = flag in _USER_FLAGS and _USER_AND_PASSWORD.fullmatch(value)
    return f"{flag}{space}{MASK}" if is_user or _is_secret_name(flag) else found[0]


def _is_secret_name(name: str) -> bool:
    """Whether the last word of a name says secret: HF_TOKEN and --api-key do, --max-tokens not."""
    begin = _NO_LETTERS.match(name)
    plain = name[begin.end() :] if begin else name
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", plain)  # apiKey
    words = [word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word]
    if not words or words[-1] not in _PLAIN_SECRETS:
        return False
    if words == ["keys"]:
        return False
    open_before = _OPEN_BEFORE.get(words[-1])
    return not (open_before and len(words) > 1 and open_before.fullmatch(words[-2]))
