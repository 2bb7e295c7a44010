"""Check the setting `roles`, which has the names of each role in the data.

{"user": "customer", "assistant": ["agent", "bot"]}  →  {"user": ["customer"], "assistant": ["agent", "bot"]}
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from tasks.core.printable import shown

Role = Literal["system", "user", "assistant", "tool"]


def _as_list(names: Any) -> Any:
    return [names] if isinstance(names, str) else names


def _refuse_swapped(roles: Any) -> Any:
    """Refuse {name: role}, the form that some tools write."""
    if isinstance(roles, dict):
        for name, role in roles.items():
            if name not in get_args(Role) and isinstance(role, str) and role in get_args(Role):
                raise ValueError(
                    f"{shown(name)} is not a role; roles go on the left, and their names in the data on the right: "
                    f"roles: {{{role}: [{name}]}}"
                )
    return roles


def _refuse_twice(roles: dict[Role, list[str]]) -> dict[Role, list[str]]:
    """Refuse a name that two roles have."""
    seen: dict[str, str] = {}
    for role, names in roles.items():
        for name in names:
            if seen.setdefault(name.lower(), role) != role:
                raise ValueError(f"{shown(name)} is a name of {seen[name.lower()]} and of {role}; case is ignored")
    return roles


Name = Annotated[str, Field(min_length=1)]
Names = Annotated[list[Name], BeforeValidator(_as_list, json_schema_input_type=Name | list[Name])]
Roles = Annotated[dict[Role, Names], BeforeValidator(_refuse_swapped), AfterValidator(_refuse_twice)]


@cache
def _roles() -> TypeAdapter[dict[Role, list[str]]]:
    return TypeAdapter(Roles)


def with_roles(source: Any, roles: Any) -> Any:
    """Return an entry of `sources` with the roles of the config.

    The entry's own names come first. Invalid values are left unchanged, because the checks of their settings report
    them.
    """
    if not isinstance(source, Mapping):
        return source
    try:
        own, further = _roles().validate_python(source.get("roles", {})), _roles().validate_python(roles)
    except ValidationError:
        return source
    taken = {name.lower() for names in own.values() for name in names}
    for role, names in further.items():
        own[role] = own.get(role, []) + [name for name in names if name.lower() not in taken]
    return {**source, "roles": {role: names for role, names in own.items() if names}}
