"""The names of NVIDIA's AutoPipeline over a Pipeline: a mesh and a configuration to a pipeline that trains."""
