"""A GPT trainer in one file, in the style of single-file CUDA trainers: settings as globals that a configurator overrides,
device strings, a memory-mapped file of tokens, autocast with a loss scaler, torch.compile, DistributedDataParallel.

    python memmap_gpt.py [--device=cpu] [--dtype=float32] [--compile=False] ...     with or without torchrun

Reads data/train.bin and data/val.bin (uint16 tokens). Each mark names a line for the test.
"""
import math
import os
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

out_dir = 'out'
eval_interval = 3
eval_iters = 2
log_interval = 1
gradient_accumulation_steps = 2
batch_size = 2
block_size = 16
vocab_size = 31
n_layer = 2
n_head = 2
n_embd = 16
dropout = 0.0
learning_rate = 1e-2
max_iters = 5
grad_clip = 1.0
fused = True
backend = 'nccl'
device = 'cuda'
dtype = 'bfloat16' if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else 'float16'
compile = True
exec(open(os.path.join(os.path.dirname(__file__), 'configurator.py')).read())

ddp = int(os.environ.get('RANK', -1)) != -1
if ddp:
    init_process_group(backend=backend)
    ddp_rank, ddp_local_rank = int(os.environ['RANK']), int(os.environ['LOCAL_RANK'])
    device = f'cuda:{ddp_local_rank}'
    torch.cuda.set_device(device)
    gradient_accumulation_steps //= int(os.environ['WORLD_SIZE'])
    master_process = ddp_rank == 0
    seed_offset = ddp_rank
else:
    master_process, seed_offset = True, 0

if master_process:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + seed_offset)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
device_type = 'cuda' if 'cuda' in device else 'cpu'
ptdtype = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}[dtype]
ctx = nullcontext() if device_type == 'cpu' else torch.amp.autocast(device_type=device_type, dtype=ptdtype)


def get_batch(split):
    data = np.memmap(os.path.join('data', f'{split}.bin'), dtype=np.uint16, mode='r')
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i:i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1:i + 1 + block_size].astype(np.int64)) for i in ix])
    if device_type == 'cuda':
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)  # MARK pinned
    return x.to(device), y.to(device)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(n_embd, bias=False), nn.LayerNorm(n_embd, bias=False)
        self.qkv, self.out = nn.Linear(n_embd, 3 * n_embd, bias=False), nn.Linear(n_embd, n_embd, bias=False)
        self.up, self.down = nn.Linear(n_embd, 4 * n_embd, bias=False), nn.Linear(4 * n_embd, n_embd, bias=False)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (part.view(b, t, n_head, c // n_head).transpose(1, 2) for part in self.qkv(self.first(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout if self.training else 0, is_causal=True)  # MARK attention
        x = x + self.out(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.ModuleList([Block() for _ in range(n_layer)])
        self.norm = nn.LayerNorm(n_embd, bias=False)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)
        self.token.weight = self.head.weight

    def forward(self, idx, targets):
        x = self.token(idx) + self.place(torch.arange(idx.size(1), dtype=torch.long, device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


model = GPT()
model.to(device)
scaler = torch.cuda.amp.GradScaler(enabled=(dtype == 'float16'))
groups = [{'params': [p for p in model.parameters() if p.dim() >= 2], 'weight_decay': 0.1},
          {'params': [p for p in model.parameters() if p.dim() < 2], 'weight_decay': 0.0}]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=fused)  # MARK optimizer
raw_model = model
if compile:
    model = torch.compile(model)
if ddp:
    model = DDP(model, device_ids=[ddp_local_rank])


@torch.no_grad()
def estimate_loss():
    means = {}
    model.eval()
    for split in ('train', 'val'):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            x, y = get_batch(split)
            with ctx:
                loss = model(x, y)
            losses[k] = loss.item()  # MARK evaluation
        means[split] = losses.mean()
    model.train()
    return means


x, y = get_batch('train')
for iter_num in range(max_iters):
    for group in optimizer.param_groups:
        group['lr'] = learning_rate * 0.5 * (1 + math.cos(math.pi * iter_num / max_iters))
    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.6f}, val loss {losses['val']:.6f}")
        torch.save({'model': raw_model.state_dict(), 'iter_num': iter_num}, os.path.join(out_dir, 'ckpt.pt'))  # MARK save
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            loss = model(x, y) / gradient_accumulation_steps
        x, y = get_batch('train')
        scaler.scale(loss).backward()  # MARK backward
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)  # MARK step
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % log_interval == 0 and master_process:
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.6f}")  # MARK log
if ddp:
    destroy_process_group()
