"""A training script with the loop of nanoGPT: accumulation, evaluation, clipping, a schedule and checkpoints.

`python train.py` trains in one process, `torchrun --nproc-per-node 2 train.py` with DDP.
"""

import math
import os
from contextlib import nullcontext
from pathlib import Path

import torch
from model import GPT
from torch.nn.parallel import DistributedDataParallel

out_dir = Path(os.environ.get("OUT_DIR", "out"))
eval_interval, eval_iters, max_iters = 4, 2, 8
gradient_accumulation_steps, batch_size, block_size = 2, 8, 16
learning_rate, min_lr, warmup_iters = 1e-2, 1e-3, 2
weight_decay, grad_clip = 0.1, 0.5

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    torch.distributed.init_process_group("gloo")
    master_process = torch.distributed.get_rank() == 0
    seed_offset = torch.distributed.get_rank()
    gradient_accumulation_steps //= torch.distributed.get_world_size()
else:
    master_process, seed_offset = True, 0
torch.manual_seed(1337 + seed_offset)
ctx = nullcontext()
data = torch.frombuffer(bytearray(Path(__file__).with_name("model.py").read_bytes()), dtype=torch.uint8).long()


def get_batch(split):
    part = data[: len(data) * 9 // 10] if split == "train" else data[len(data) * 9 // 10 :]
    starts = torch.randint(len(part) - block_size, (batch_size,)).tolist()
    x = torch.stack([part[start : start + block_size] for start in starts])
    return x, torch.stack([part[start + 1 : start + 1 + block_size] for start in starts])


model = GPT(vocab_size=256, block_size=block_size, layers=4, heads=2, width=32)
scaler = torch.amp.GradScaler("cpu", enabled=False)
optimizer = model.configure_optimizers(weight_decay, learning_rate)
if ddp:
    model = DistributedDataParallel(model)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            x, y = get_batch(split)
            with ctx:
                _, loss = model(x, y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(iter_num):
    if iter_num < warmup_iters:
        return learning_rate * (iter_num + 1) / warmup_iters
    share = (iter_num - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * share)) * (learning_rate - min_lr)


x, y = get_batch("train")
raw_model = model.module if ddp else model
best_val_loss = math.inf
for iter_num in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.5f}, val loss {losses['val']:.5f}")
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]
            out_dir.mkdir(exist_ok=True)
            torch.save({"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}, out_dir / "ckpt.pt")
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            _, loss = model(x, y)
            loss = loss / gradient_accumulation_steps
        x, y = get_batch("train")
        scaler.scale(loss).backward()
    if grad_clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if master_process:
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.5f}")
