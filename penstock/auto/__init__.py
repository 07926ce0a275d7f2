"""AutoPipeline: builds a Pipeline from a mesh and a configuration, with the names of NVIDIA's AutoPipeline."""
