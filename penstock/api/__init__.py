"""The functions and classes that Python users call; `penstock` exports them.

models.py                capture, split, explain, generate_code: a model, its graph and its stages
measuring.py             measure, measure_speed, measure_links: costs of a model, a device and links
local_ranks.py           costs of the runtime, if the ranks are processes of this machine
plan.py                  plan: search for the best plan; example_batch.py measures microbatches of its batch
plan_together.py         plan_together: the same on the ranks of a running process group
simulation.py            schedule, simulate: named schedules and predicted traces
pipeline.py              Pipeline: one rank of a pipeline that trains
arguments.py             checks of the arguments of Pipeline, plan and check, and their comparison over ranks
forward_pass.py          the result of `Pipeline.forward`
rank_parameters.py       functions of torch that need the gradients of all ranks: clip_grad_norm_, LBFGS
check.py                 check: one step compared with the unsplit model
train_loop.py            fit: the training loop; train_options.py has its options, step_logs.py its logs
report.py                report: a plan or a run as an HTML page, with advice
pipe_model.py            pipe_model: capture, measure and partition in one call
doctor.py                checks of this machine, and of what a launcher has set
progress.py              a progress bar
"""
