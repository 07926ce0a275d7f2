"""flat: a verb that takes records of options becomes a command that takes each of their fields."""

from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints

from penstock.cli.outcome import explained

Verb = Callable[..., None]


def flat(verb: Verb) -> Verb:
    """The command of a verb: an option is declared once, as a field of a record, for all verbs that take it."""
    records: dict[str, Any] = {name: hint for name, hint in get_type_hints(verb).items() if is_dataclass(hint)}
    own = {name: [field.name for field in fields(record)] for name, record in records.items()}

    def command(**given: Any) -> None:
        with explained():
            built = {name: record(**{key: given.pop(key) for key in own[name]}) for name, record in records.items()}
            verb(**built, **given)

    parameters = [part for parameter in signature(verb).parameters.values() for part in _spread(parameter, records)]
    # What typer reads of a function: its name, its docstring, and the signature that is laid out here.
    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _spread(parameter: Parameter, records: dict[str, Any]) -> list[Parameter]:
    if parameter.name not in records:
        return [parameter]
    hints = get_type_hints(records[parameter.name], include_extras=True)
    return [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=_default(field), annotation=hints[field.name])
        for field in fields(records[parameter.name])
    ]


def _default(field: "Field[Any]") -> Any:
    return Parameter.empty if field.default is MISSING else field.default
