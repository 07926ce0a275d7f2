"""A small Llama trained by AutoPipeline on 4 local processes, compared with one process.

Run it with `python examples/auto_pipeline.py`.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import penstock
from penstock import AutoPipeline, AutoPipelineConfig

RANKS, STEPS, SAMPLES, LENGTH = 4, 5, 4, 16


def make_model() -> nn.Module:
    """Build the model from a configuration, without a download; the weights are the same on every rank."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return tokens and next tokens, the same batches on every rank."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 100, (STEPS, SAMPLES, LENGTH + 1), generator=generator)
    return [(batch[:, :-1], batch[:, 1:]) for batch in tokens]


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over the tokens of a microbatch."""
    return nn.functional.cross_entropy(logits.float().view(-1, logits.size(-1)), targets.reshape(-1))


def train() -> tuple[list[float], str]:
    """Train on one rank."""
    mesh = init_device_mesh("cpu", mesh_shape=(RANKS,), mesh_dim_names=("pp",))
    config = AutoPipelineConfig(world_mesh=mesh, pp_schedule="1f1b", pp_microbatch_size=1, pp_batch_size=SAMPLES)
    ap = AutoPipeline(config).build(make_model(), loss_fn=loss_fn)
    optimizer, found = torch.optim.AdamW(ap.parameters(), lr=1e-2), []
    losses: list[torch.Tensor] = []
    for ids, labels in batches():
        optimizer.zero_grad()
        ap.step(ids, target=labels, losses=losses)
        ap.scale_grads_by_divisor(len(losses))  # a step adds the sum over its microbatches
        ap.clip_grad_norm(max_norm=1.0)
        optimizer.step()
        found.append(torch.stack(losses).mean().item())
    return found, ap.debug_summary()


def train_alone() -> list[float]:
    """Train in plain PyTorch."""
    model, found = make_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for ids, labels in batches():
        optimizer.zero_grad()
        loss = loss_fn(model(ids).logits, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found


def main() -> None:
    """Train on processes and in one, and compare."""
    (losses, summary), *_ = penstock.launch(train, RANKS)
    print(summary, end="\n\n")
    for step, (ours, plain) in enumerate(zip(losses, train_alone(), strict=True)):
        print(f"step {step}: pipeline {ours:.6f}, one process {plain:.6f}, difference {abs(ours - plain):.1e}")
        assert abs(ours - plain) < 1e-4


if __name__ == "__main__":
    main()
