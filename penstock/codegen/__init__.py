"""The stages of a model as a Python file that can be read, imported and run by hand. Files in reading order:

document.py       the file: support code, one class per stage, and `run`
stage_class.py    the calls of one stage, the values that enter and leave it, and its class
statements.py     a recorded call or guard as Python statements
expressions.py    arguments, constants and calls as Python expressions
names.py          variables of values, and importable names of functions and classes
formatting.py     statements and docstrings as lines of code
support.py        definitions that are copied into every generated file
"""

from penstock.codegen.document import write_stages
