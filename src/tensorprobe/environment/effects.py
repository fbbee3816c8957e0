"""What a difference between two environments can do to numbers: a table, and its words."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Effect = Literal["numbers", "maybe", "none"]


class EffectRule(NamedTuple):
    """Facts whose name matches: what they can do, and why, in a few words."""

    pattern: str
    effect: Effect
    why: str


# The first that matches counts; within one effect earlier rules are named first.
RULES = (
    EffectRule(
        r"(tool|tensorprobe|kind|format|time|created|host|run|process|name|is_rank|folder|path"
        r"|command.*|converted_from)",
        "none",
        "where and when it ran",
    ),
    EffectRule(
        r"config\..*|.*\.seconds|ranks.*|start|unfinished|finished.*", "none", "of the recording"
    ),
    EffectRule(r"model\.(modules|weights)\..*", "numbers", "another model, or other weights"),
    EffectRule(r"weight_statistics\..*", "numbers", "other weights"),
    EffectRule(r"(batches|data_statistics).*", "numbers", "other data"),
    EffectRule(
        r"numerics\..*tf32.*|numerics\.float32_matmul_precision|.*fp32_precision",
        "numbers",
        "TF32: products of float32 keep 10 bits",
    ),
    EffectRule(r"npu\..*hf32|.*hf32.*", "numbers", "HF32: products of float32 keep fewer bits"),
    EffectRule(
        r"environment\.(NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE)",
        "numbers",
        "TF32: products of float32 keep 10 bits",
    ),
    EffectRule(r"numerics\.sdpa_.*", "numbers", "another kernel of attention"),
    EffectRule(
        r"(packages|installed)\.(flash.attn|xformers|transformer.engine).*",
        "numbers",
        "other kernels of attention",
    ),
    EffectRule(r"environment\.NVTE_.*", "numbers", "another kernel of attention"),
    EffectRule(
        r"numerics\.(autocast.*|default_dtype)|torch\.default_dtype", "numbers", "another dtype"
    ),
    EffectRule(r"numerics\.(deterministic.*|cudnn_.*|mkldnn_enabled)", "numbers", "other kernels"),
    EffectRule(r"numerics\..*", "numbers", "how products are summed"),
    # Whole names only: `logit_scale` is no log, and `model_name` is another model.
    EffectRule(
        r"(hyperparameters|arguments)\.(.*\.)?(output_dir|out_dir|log_dir|logging_dir|save_dir|save"
        r"|run_name|exp_name|experiment_name|project|report_to|tensorboard_dir|wandb_\w+"
        r"|log_interval|logging_steps|save_interval|save_steps|hub_\w+)(\.\d+)?",
        "none",
        "names and places",
    ),
    EffectRule(r"(hyperparameters|arguments)\..*", "numbers", "another hyperparameter"),
    EffectRule(r"(torch\.seed|seed\..*|cuda\.seed|npu\.seed)", "maybe", "another seed"),
    EffectRule(r"random\..*", "maybe", "another random state when it was collected"),
    EffectRule(r"program\.(sha256|modules\..*)", "numbers", "other source code"),
    EffectRule(r"program\.script", "none", "the name of the script"),
    EffectRule(r"torch\.(version|git|cuda|hip|debug)|torch\.torch_npu", "numbers", "another torch"),
    EffectRule(
        r"(cuda|npu)\.(devices|capability|cann|runtime|cudnn|arch.*)",
        "numbers",
        "another device, or another library of kernels",
    ),
    EffectRule(r"torch\.cpu_capability", "numbers", "other kernels on the CPU"),
    EffectRule(
        r"torch\.num_(interop_)?threads|environment\.(OMP|MKL)_NUM_THREADS|cpu_count",
        "maybe",
        "threads: sums in another order",
    ),
    EffectRule(
        r"environment\.(CUBLAS.*|ONEDNN.*|DNNL.*|ATEN_CPU_CAPABILITY|MKL_.*|CLOSE_MATMUL.*"
        r"|ATB_.*|HCCL_DETERMINISTIC|LCCL_DETERMINISTIC|INF_NAN.*)",
        "numbers",
        "other kernels",
    ),
    EffectRule(
        r"environment\.(NCCL|HCCL)_(ALGO|PROTO|NVLS.*)",
        "numbers",
        "reductions over ranks in another order",
    ),
    EffectRule(
        r"world_size|environment\.(LOCAL_)?WORLD_SIZE", "numbers", "another number of ranks"
    ),
    EffectRule(
        r"environment\.(RANK|LOCAL_RANK|CUDA_VISIBLE_DEVICES|ASCEND_RT_VISIBLE_DEVICES"
        r"|CUDA_LAUNCH_BLOCKING"
        r"|ASCEND_LAUNCH_BLOCKING|CUDA_MODULE_LOADING)",
        "none",
        "where it runs",
    ),
    EffectRule(r"environment\.PYTHONHASHSEED", "maybe", "the order of sets"),
    EffectRule(r"environment\..*", "maybe", "an environment variable"),
    EffectRule(
        r"(packages|installed)\.(torch|torch.npu|apex|triton|deepspeed|bitsandbytes|numpy"
        r"|transformers|accelerate|peft|diffusers|torchvision|megatron.*|mindspeed.*|nvidia.*)",
        "numbers",
        "another library that computes",
    ),
    EffectRule(r"(packages|installed)\..*", "maybe", "another version of a package"),
    EffectRule(
        r"python|platform|(cuda|npu)\.(driver|firmware|nccl|linalg)", "maybe", "another system"
    ),
    EffectRule(r"random_calls\..*", "maybe", "random numbers are drawn more or less often"),
    EffectRule(r"torch\.build", "maybe", "torch was built in another way"),
    EffectRule(r".*current_device", "none", "where it runs"),
)
_COMPILED = tuple((re.compile(rule.pattern, re.IGNORECASE), rule) for rule in RULES)
_OTHER = EffectRule("", "maybe", "not known what it does")
ORDER: dict[Effect, int] = {"numbers": 0, "maybe": 1, "none": 2}


def effect_of(fact: str) -> tuple[int, EffectRule]:
    """The rule for a fact, and its place: lower ones say more."""
    for place, (pattern, rule) in enumerate(_COMPILED):
        if pattern.fullmatch(fact):
            return ORDER[rule.effect] * len(_COMPILED) + place, rule
    return (ORDER[_OTHER.effect] + 1) * len(_COMPILED) - 1, _OTHER
