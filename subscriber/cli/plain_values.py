"""Values of options that need no conversion.

New versions of Typer convert each value with pydantic, also a text into a text, and an absent value. The import of
pydantic takes 0.1 s of a processor, which is a quarter of a short command.
"""

from __future__ import annotations

from enum import EnumType
from typing import Any


class _PlainValue:
    """The conversion of a parameter's value. It calls Typer's own only for a value of another type."""

    def __init__(self, annotation: object) -> None:
        self._annotation = annotation

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if type(value) is self._annotation:
            return value
        if self._annotation == list[str] and type(value) in (list, tuple):
            return [str(item) for item in value]
        if isinstance(self._annotation, EnumType) and value in self._annotation._value2member_map_:
            return self._annotation(value)
        param._runtime_param = None  # noqa: SLF001
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def convert_on_demand(command: Any) -> None:
    """Set the conversion of a command's parameters, its option --help included.

    A version of Typer that works in another way does not read the attribute, and converts each value itself.
    """
    parameters_of = command.get_params

    def get_params(context: Any) -> list[Any]:
        parameters: list[Any] = parameters_of(context)
        for parameter in parameters:
            if getattr(parameter, "_runtime_param", False) is None:
                parameter._runtime_param = _PlainValue(  # noqa: SLF001
                    parameter.type_descriptor.annotation
                )
        return parameters

    command.get_params = get_params
