"""Losses: how the loss of a batch is made of those of its microbatches.

A *rule* says how a loss is reduced: of which *terms* it is a sum, and by what each of them is divided. A *count* is
that divisor in one microbatch. The *weight* of a microbatch is its count over that of the batch: the factor of its loss
and of its gradients, so that their sum is that of the batch.

    read    `reading` of a loss function, `model_rule` of a model that returns its loss: a recording tells the rule, and
            how to count before a step, from targets and inputs alone (`counting`)
    try     `trial` of a loss function, `stand_in` of a model: losses and gradients of a microbatch (a `case`) and of
            two parts of it (`rows`) are `evidence` for the rule or against it
    judge   `verdict`: the rule that was read, or another that the trial bears out, or doubts in words (`coupling`)
    weigh   `weighing`: the counts of a step's microbatches give their weights
    prove   `divisors`: the autograd graph of every loss shows by what it was really divided, and `way` which way the
            function took; where that is not what was counted (`proof`), the rule is found anew and the user is told

`function_rule` and `model_rule` keep what was found. Losses that modules add are weighted by `added`. None of this runs
a block of the model.
"""
