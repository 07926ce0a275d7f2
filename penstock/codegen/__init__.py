"""Writing: the stages of a model as a Python file that can be read, imported and run by hand."""

from penstock.codegen.storing import write_stages

__all__ = ["write_stages"]
