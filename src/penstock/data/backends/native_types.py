"""What methods of deployments take and give, in Python's own types: arguments made, results made plain."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
from pydantic import BaseModel

from penstock.errors import BadRequest, Error

_SHOWN_CHARS = 500


def argument(dtype: str | None, kwargs: Mapping[str, Any], dtypes: Mapping[str, Any]) -> Any:
    """What a method is called with: the class that `dtype` names, made of `kwargs`, or these as a dict.

    Raises: BadRequest that names what is wrong.
    """
    if dtype is None:
        return dict(kwargs)
    if dtype not in dtypes:
        known = ", ".join(map(repr, sorted(dtypes))) or "none"
        raise BadRequest(f"dtype_mapping has no {dtype!r}; it has {known}.", param="dtype")
    try:
        return dtypes[dtype](**kwargs)
    except Exception as error:  # the class is the user's own
        why = f"{type(error).__name__}: {str(error)[:_SHOWN_CHARS]}"
        raise BadRequest(
            f"{dtype} cannot be made of request_kwargs: {why}", param="request_kwargs"
        ) from error


def plain(items: Sequence[Any]) -> dict[str, Any]:
    """The columns of a result: a model's or dataclass's fields, a dict's; `result` holds anything else.

    items: what a method gave. Of a stream of several, `results` holds them all, in their order.
    """
    if len(items) != 1:
        return {"results": [_plain(item) for item in items]}
    found = _plain(items[0])
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {"result": found}


def _plain(item: Any) -> Any:
    if isinstance(item, BaseModel):
        return item.model_dump()
    if isinstance(item, msgspec.Struct):
        return msgspec.structs.asdict(item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return dataclasses.asdict(item)
    return dict(cast("Mapping[str, Any]", item)) if isinstance(item, Mapping) else item


def refusal(found: Mapping[str, Any]) -> tuple[int, dict[str, Any]] | None:
    """Status and envelope of a result that is an error, as engines answer by handle; None when it is none."""
    said = found if found.get("object") == "error" else found.get("error")
    if not isinstance(said, Mapping) or "message" not in said or (said is not found and len(found) > 1):
        return None
    detail = dict(cast("Mapping[str, Any]", said))
    return _status(detail), {"error": detail}


def _status(detail: Mapping[str, Any]) -> int:
    code, kind = detail.get("code"), str(detail.get("type") or "")
    if isinstance(code, int) and 400 <= code < 600:
        return code
    if code in _STATUSES:
        return _STATUSES[code]
    return 400 if "invalid" in kind or "BadRequest" in kind else 500


def _statuses(kind: type[Error]) -> dict[Any, int]:
    found = {kind.code: kind.status}
    for one in kind.__subclasses__():
        found |= _statuses(one)
    return found


_STATUSES = _statuses(Error)
