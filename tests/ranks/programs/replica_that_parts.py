"""Two ranks train the same model; rank 1 changes a weight after the first step."""

import os

import torch
import torch.distributed as dist

import tensorprobe as tp

dist.init_process_group("gloo", init_method=os.environ["MEET"])
torch.manual_seed(0)
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with tp.Recorder("run", keep="stats") as recorder:
    for _ in range(2):
        net(torch.ones(2, 4)).sum().backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        recorder.step()
        if dist.get_rank() == 1:
            with torch.no_grad():
                net.weight.add_(1e-3)
dist.destroy_process_group()
