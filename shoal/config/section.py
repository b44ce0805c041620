"""A part of a config: typed, frozen and closed, with errors in the words of the file."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.errors import UsageError, did_you_mean

T = TypeVar("T", bound=BaseModel)


class Section(BaseModel):
    """Frozen, and closed: a key that does not exist is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def validate(section: type[T], values: dict[str, Any], *, where: str) -> T:
    """A section from plain values.

    Raises:
        UsageError: one line for each key that does not exist (with the nearest that does) and each bad value.
    """
    try:
        return section.model_validate(values)
    except ValidationError as error:
        raise UsageError("\n".join(f"{where}: {_explain(section, e)}" for e in error.errors())) from None


def _explain(section: Any, error: Any) -> str:
    keys = [k for k in error["loc"] if isinstance(k, str)]
    dotted = ".".join(keys)
    if error["type"] == "extra_forbidden":
        elsewhere = [f"{name}.{keys[-1]}" for name, field in section.model_fields.items()
                     if keys[-1] in getattr(field.annotation, "model_fields", {})]
        if elsewhere:
            return f"there is no key '{dotted}'; did you mean '{' or '.join(elsewhere)}'?"
        for key in keys[:-1]:
            section = section.model_fields[key].annotation
        return f"there is no key '{dotted}'; {did_you_mean(keys[-1], section.model_fields)}"
    return f"{dotted} = {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def plain(config: BaseModel) -> dict[str, Any]:
    """Nested plain values without what is unset, fit for TOML and JSON."""
    return config.model_dump(mode="json", exclude_none=True)
