"""The names of the modules of every stage, for models that call their parts as Hugging Face decoders do."""

from itertools import islice

from penstock.errors import PartitionError
from penstock.ir import as_int


def generate_hf_model_fqn_per_model_part(
    num_stages: int,
    num_layers: int,
    include_embeddings: bool = True,
    include_lm_head: bool = True,
    include_rotary_emb: bool = True,
    fqn_prefix: str = "model.",
) -> list[list[str]]:
    """The layers shared out, embeddings in front, norm and head behind, and the rotary embedding on every stage."""
    counts = shared_out(num_layers, num_stages)
    layers = iter(range(num_layers))
    stages = [[f"{fqn_prefix}layers.{layer}" for layer in islice(layers, count)] for count in counts]
    if include_embeddings:
        stages[0].insert(0, f"{fqn_prefix}embed_tokens")
    stages[-1].append(f"{fqn_prefix}norm")
    if include_lm_head:
        stages[-1].append("lm_head")
    if include_rotary_emb:
        for stage in stages:
            stage.append(f"{fqn_prefix}rotary_emb")
    return stages


def shared_out(num_layers: int, num_stages: int) -> list[int]:
    """How many layers every stage gets: alike to within one, the larger ones first, none of them empty."""
    if (as_int(num_stages) or 0) < 1 or (as_int(num_layers) or 0) < num_stages:
        raise PartitionError(
            "every stage needs a layer",
            stages=num_stages,
            layers=num_layers,
            hint="fewer stages, or module_fqns_per_model_part",
        )
    least, more = divmod(num_layers, num_stages)
    return [least + (stage < more) for stage in range(num_stages)]
