"""The graph in figures: what a partitioner looks at instead of nodes, values and parameters."""
