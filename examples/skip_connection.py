"""A model whose first stage feeds its last stage directly, as a U-Net does: messages skip the stages in between.

Run it with `python examples/skip_connection.py`. Nothing here imports torch.
"""

import penstock
from penstock.ir import Send

STAGES = 4


def main() -> None:
    """Lower and prove a schedule, and print the messages of the first microbatch."""
    chain = [(stage, stage + 1) for stage in range(STAGES - 1)]
    cuts = penstock.Cuts.of(STAGES, [*chain, (0, STAGES - 1)])
    program = penstock.lower(penstock.schedule("1f1b", ranks=STAGES, microbatches=6), cuts=cuts)
    penstock.verify(program)
    for rank, order in enumerate(program.orders):
        messages = [str(action) for action in order if isinstance(action, Send) and action.microbatch == 0]
        print(f"rank {rank} sends {', '.join(messages)}")
    print(f"{penstock.simulate(program).bubble:.1%} bubble")


if __name__ == "__main__":
    main()
