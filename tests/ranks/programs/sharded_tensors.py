"""DTensors on a mesh of two ranks, and a write to the part that this rank has."""

import os
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import tensorprobe as tp

warnings.simplefilter("ignore")
dist.init_process_group("gloo", os.environ["MEET"])
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
whole = torch.arange(16.0).reshape(4, 4)
rows = distribute_tensor(whole, mesh, [Shard(0)])
full = distribute_tensor(torch.eye(4) * 2, mesh, [Replicate()])
with tp.Recorder("L1", level="L1", keep="tensors", log=lambda text: None):
    torch.mul(rows, 2)
    rows.to_local().add_(100)
    torch.mul(rows, 2)
    torch.matmul(rows, full)
    rows.sum(0)
    torch.relu(rows.redistribute(mesh, [Replicate()]))
dist.destroy_process_group()
