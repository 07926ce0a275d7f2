"""The door to local processes."""

from penstock.runtime.launch import launch

__all__ = ["launch"]
