"""A pipeline of two ranks whose layers are split over two tensor-parallel ranks each, compared with one process.

Run it with `python examples/tensor_parallel.py`. It starts 4 local processes, and splits layers by the tensor-parallel
plan in the configuration of the model.
"""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import penstock

RANKS, TENSOR_RANKS, STEPS, SAMPLES, LENGTH, VOCABULARY = 2, 2, 5, 4, 16, 64
STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def make_model() -> LlamaForCausalLM:
    """Build a small Llama, with the same weights on every rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))


def batches() -> Tensor:
    """Return the tokens of all steps."""
    return torch.randint(0, VOCABULARY, (STEPS, SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def loss_fn(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """Return the mean over all tokens."""
    return functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def split_layers(stage: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Split the layers of a stage as the configuration of the model says. A stage has the names of the model."""
    plan = {name: STYLES[style]() for name, style in stage.whole_model.config.base_model_tp_plan.items()}
    parallelize_module(stage.model, mesh["tp"], plan)


def train(plan: penstock.Plan) -> list[float]:
    """Train on one process; all ranks are given the same batches, and have the same losses."""
    mesh = init_device_mesh("cpu", (RANKS, TENSOR_RANKS), mesh_dim_names=("pp", "tp"))
    pipe = penstock.Pipeline(make_model(), plan, loss_fn=loss_fn, mesh=mesh, parallelize_fn=split_layers)
    optimizer, losses = torch.optim.AdamW(pipe.parameters(), lr=1e-2), []
    for tokens in batches():
        optimizer.zero_grad()
        losses.append(pipe.step(tokens[:, :-1], target=tokens[:, 1:]).loss.item())
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
    return losses


def train_alone() -> list[float]:
    """Train in plain PyTorch."""
    model, losses = make_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for tokens in batches():
        optimizer.zero_grad()
        loss = loss_fn(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Plan, train, and compare."""
    plan = penstock.plan(make_model(), (batches()[0][:, :-1],), ranks=RANKS, microbatches=2, schedule="1f1b")
    losses = penstock.launch(train, RANKS * TENSOR_RANKS, plan)[0]
    for step, (ours, plain) in enumerate(zip(losses, train_alone(), strict=True)):
        print(f"step {step}: 4 processes {ours:.6f}, one process {plain:.6f}, difference {abs(ours - plain):.1e}")
        assert abs(ours - plain) < 1e-4


if __name__ == "__main__":
    main()
