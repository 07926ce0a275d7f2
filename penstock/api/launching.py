"""The door to local processes."""

from penstock.processes.launch import launch

__all__ = ["launch"]
