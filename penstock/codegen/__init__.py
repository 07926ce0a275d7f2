"""The stages of a model as a Python file that can be read, imported and run by hand."""

from penstock.codegen.document import write_stages
