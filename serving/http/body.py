"""A request's body: read within a size limit, parsed as strict JSON, decoded into a schema."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import Request

from serving.errors import (
    InvalidRequestError,
    PayloadTooLargeError,
    UnavailableError,
    UnsupportedMediaTypeError,
)
from serving.http.schemas import Refused


# Parsing holds up every stream: this much takes well under a second.
MAX_BODY_BYTES = 4 * 2**20

JSON = "application/json"

T = TypeVar("T")

_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_FIELD = re.compile(r" field `(.+)`")


async def read_object(request: Request) -> dict[str, Any]:
    """The body as a JSON object. It may say that it is JSON, or nothing.

    Raises InvalidRequestError where it is none, UnsupportedMediaTypeError where it says that it is
    something else, PayloadTooLargeError over MAX_BODY_BYTES, and UnavailableError where the server
    stops before all of it has come.
    """
    media = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if media != JSON:
        raise UnsupportedMediaTypeError(f"the body must be {JSON}, its Content-Type is {media!r}")
    try:
        body = await _read(request)
    except asyncio.CancelledError:  # only a server that stops, and has waited long enough, does it
        raise UnavailableError("the server is stopping") from None
    try:
        data = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise InvalidRequestError(f"the request body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidRequestError("the request body must be a JSON object")
    return data


async def _read(request: Request) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise PayloadTooLargeError(f"the request body is over {MAX_BODY_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def decode(data: Mapping[str, Any], schema: type[T], refused: Refused, where: str = "") -> T:
    """`data` as a `schema`. Raises InvalidRequestError that names a field at fault.

    `where` is the place of `data` inside the body, for messages.
    """
    known = {}
    for field, value in data.items():
        if field not in refused:
            known[field] = value
        elif value is not None and not any(_same(value, off) for off in refused[field]):
            raise InvalidRequestError(
                f"{where}{field} with this value is not supported", param=f"{where}{field}"
            )
    try:
        return msgspec.convert(known, schema)
    except msgspec.ValidationError as error:
        raise _named(str(error), where) from None


def _same(value: Any, off: Any) -> bool:
    """Equality in which False is not 0, as in JSON."""
    return value == off and isinstance(value, bool) == isinstance(off, bool)


def _named(message: str, where: str) -> InvalidRequestError:
    """A decoder's "Expected `int`, got `str` - at `$.seed`", with its field as param."""
    place = _PLACE.search(message)
    path = where + (place[1].replace("[...]", "") if place else "")  # of any of an object's values
    message = _PLACE.sub("", message)
    field = _FIELD.search(message)  # unknown, or missing
    param = ".".join(filter(None, (path.rstrip("."), field[1] if field else "")))
    message = message[0].lower() + message[1:]
    return InvalidRequestError(f"{param}: {message}" if param else message, param=param or None)
