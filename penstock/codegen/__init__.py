"""The stages of a model as a Python file that can be read, imported and run by hand. Files in reading order:

document.py       the file: support code, one class per stage, and `run`
section.py        the calls of one stage, and the values that enter and leave it
statements.py     a recorded call or guard as Python statements
expressions.py    arguments, constants and calls as Python expressions
names.py          variables of values, and importable names of functions and classes
formatting.py     statements as lines of code
support.py        definitions that are copied into every generated file
"""

from penstock.codegen.document import write_stages
