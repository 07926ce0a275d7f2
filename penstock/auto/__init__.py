"""The door with the names of AutoPipeline: a mesh, a configuration and a model to a pipeline that trains."""
