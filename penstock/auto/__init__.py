"""AutoPipeline: builds a Pipeline from a mesh and a configuration, with the names of NVIDIA's AutoPipeline.

config.py      AutoPipelineConfig, and which configurations are refused
planning.py    the plan of a configuration: the stages, the schedule and an example batch
pipeline.py    AutoPipeline: build, step, eval and reports about the stages of a rank
"""
