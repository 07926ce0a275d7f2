"""The door to local processes."""

from penstock.launch import launch

__all__ = ["launch"]
