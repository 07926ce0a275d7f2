"""MECHANISM: Program + Stages + Transport -> losses, gradients, recorded Trace."""
