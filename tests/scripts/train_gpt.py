"""A small character model, written for CUDA with the constructs of single-file GPT trainers. Run with or without torchrun.

    python train_gpt.py [--device=cpu] [--dtype=float32] [--compile=True] [--resume=True]

Prints one JSON line with the losses.
"""
import json
import os
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

backend = 'nccl'
device = 'cuda'
dtype = 'bfloat16' if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else 'float16'
compile = False
resume = False
fused = True
steps = 4
out = 'ckpt.pt'
exec(open(os.path.join(os.path.dirname(__file__), 'overrides.py')).read())

ddp = int(os.environ.get('RANK', -1)) != -1
if ddp:
    init_process_group(backend=backend)
    rank, local_rank, world = (int(os.environ[name]) for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE'))
    device = f'cuda:{local_rank}'
    torch.cuda.set_device(device)
else:
    rank, world = 0, 1

torch.manual_seed(1337)
torch.cuda.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
device_type = 'cuda' if 'cuda' in device else 'cpu'
ptdtype = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}[dtype]
ctx = nullcontext() if device_type == 'cpu' or dtype == 'float32' else torch.amp.autocast(device_type=device_type, dtype=ptdtype)


class Model(nn.Module):
    def __init__(self, vocabulary=17, width=16, length=8):
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, idx, targets):
        b, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.token(idx) + self.place(pos)
        mask = torch.triu(torch.ones(t, t, device=idx.device, dtype=torch.bool), 1)
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


text = torch.randint(17, (64, 9), generator=torch.Generator().manual_seed(3))


def get_batch(step):
    rows = text[step * 8:(step + 1) * 8][rank::world]
    x, y = rows[:, :-1], rows[:, 1:]
    if device_type == 'cuda':
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x.to(device), y.to(device)


model = Model()
first = 0
if resume:
    checkpoint = torch.load(out, map_location=device)
    model.load_state_dict(checkpoint['model'])
    first = checkpoint['step']
model.to(device)
scaler = torch.amp.GradScaler('cuda', enabled=(dtype == 'float16'))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), fused=fused)
if resume:
    optimizer.load_state_dict(checkpoint['optimizer'])
raw = model
if compile:
    model = torch.compile(model)
if ddp:
    model = DDP(model, device_ids=[local_rank])

losses = []
for step in range(first, first + steps):
    x, y = get_batch(step)
    with ctx:
        loss = model(x, y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    value = loss.detach().clone()
    if ddp:
        torch.distributed.all_reduce(value)
    losses.append(value.item() / world)
torch.cuda.synchronize() if device_type == 'cuda' else None

if rank == 0:
    torch.save({'model': raw.state_dict(), 'optimizer': optimizer.state_dict(), 'step': first + steps}, out)
    print(json.dumps({'losses': losses, 'device': device, 'name': __name__}))
if ddp:
    destroy_process_group()
