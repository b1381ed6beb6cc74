"""What a rehearsal on Ascend finds, one a line. Each mark names the line for the test; the argument names how it ends."""

import sys

import torch
from torch.nn import functional as F

device = torch.device("cuda")
weight = torch.ones(8, 8, device=device, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.01)
for _ in range(4):
    loss = (weight @ weight).mean()
    calls = loss.item()  # MARK item
    positive = weight[weight > 0]  # MARK boolean
    factor = torch.linalg.cholesky_ex(weight.detach() + 9 * torch.eye(8, device=device))  # MARK fallback
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(weight[0, 0])  # MARK print
places = weight.detach().nonzero()  # MARK nonzero

short = torch.ones(4, device=device).to(torch.bfloat16)  # MARK bfloat16
heads = torch.ones(1, 2, 16, 8, device=device, dtype=torch.float16)
plain = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)  # MARK plain
boolean = torch.ones(16, 16, device=device, dtype=torch.bool)
masked = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=boolean)  # MARK boolean mask
bias = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=boolean.half())  # MARK bias
large = torch.ones(2**24, device=device)  # MARK large
del large

if sys.argv[1] == "memory":
    larger = torch.zeros(2**28, device=device)  # MARK memory
if sys.argv[1] == "operator":
    import torch_npu

    wide = heads.double()
    torch_npu.npu_fusion_attention(wide, wide, wide, 2, "BNSD")  # MARK operator
if sys.argv[1] == "own":
    raise KeyError("of its own")  # MARK own
print("end")
