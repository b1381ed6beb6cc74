"""What an emulated Trainium refuses or gets wrong, one a line. Each mark names the line for the test."""

import torch
from torch.nn import functional as F

device = torch.device("cuda")
angles = torch.linspace(0, 1, 4, device=device)
turned = torch.polar(torch.ones_like(angles), angles)  # MARK rope
turned = turned * turned  # MARK product

precise = torch.ones(2, dtype=torch.float64, device=device)
loss = (precise + 1e-12).sum()  # MARK float64

key = torch.full((4,), 40_503, device=device)
for _ in range(2):
    key = key * 2_654_435_761 + 1  # MARK int64

left = torch.full((2, 2), 4097, dtype=torch.int64, device=device)
product = left @ left  # MARK matmul

heads = torch.randn(1, 2, 512, 64, device=device)
bias = torch.zeros(512, 512, device=device)
fused = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)  # MARK fused
masked = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias)  # MARK mask
queries = heads[:, :, :256]
hazard = F.scaled_dot_product_attention(queries, heads, heads, is_causal=True)  # MARK hazard


def scaled(x):
    return x * 2 + 1  # MARK graph


compiled = torch.compile(scaled)
for size in (3, 4):
    compiled(torch.ones(size, device=device))

if torch.cuda.get_device_properties(0).total_memory < 2**28:
    large = torch.zeros(2**26, device=device)  # MARK memory
print("end", float(fused.sum()) == float(fused.sum()))
