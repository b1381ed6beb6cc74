"""A training loop with known faults, one a line. Each mark names the line for the test."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
steps = int(sys.argv[1])
calls = 0
for step in range(steps):
    x = torch.ones(6, 8, device="cuda")  # MARK input
    out = model(x)  # MARK forward
    loss = out.pow(2).mean()
    calls += loss.item() > 0  # MARK item
    kept = x[x > 0]  # MARK boolean
    grown = torch.ones(step + 3, device="cuda") * 2  # MARK growing
    if step == 4:
        print(out[0, 0])  # MARK print
    if step == 3:
        other = torch.ones(77, device="cuda") + 1  # MARK late
    heads = torch.ones(1, 2, 16, 8, device="cuda")
    attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)  # MARK dropout
    noise = torch.empty(5, device="cuda").normal_()  # MARK fallback
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("done", calls)
