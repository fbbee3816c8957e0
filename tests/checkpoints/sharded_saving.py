"""Saves one model as two ranks do: torch.distributed.checkpoint, and a file of DTensors a rank."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

folder, rank = sys.argv[1], int(sys.argv[2])
store = dist.FileStore(f"{folder}/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
torch.manual_seed(0)
state = {
    "rows": distribute_tensor(torch.randn(5, 3), mesh, [Shard(0)]),
    "columns": distribute_tensor(torch.randn(4, 6), mesh, [Shard(1)]),
    "replica": distribute_tensor(torch.randn(3), mesh, [Replicate()]),
}
dcp.save({"model": state, "epoch": 3}, checkpoint_id=f"{folder}/dcp")
os.makedirs(f"{folder}/fsdp", exist_ok=True)
torch.save(state, f"{folder}/fsdp/model_world_size_2_rank_{rank}.pt")
whole = {key: tensor.full_tensor() for key, tensor in state.items()}
if rank == 0:
    torch.save({"model": whole, "epoch": 3}, f"{folder}/whole.pt")
dist.barrier()
dist.destroy_process_group()
