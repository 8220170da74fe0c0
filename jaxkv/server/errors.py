"""Every failure as an OpenAI error object: {"error": {"message", "type", "param", "code"}}, code = HTTP status."""

import http
import logging
from typing import Any

import orjson
import pydantic
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from jaxkv.async_engine import EngineFailedError
from jaxkv.core.errors import RequestError

logger = logging.getLogger(__name__)

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
# What clients should do next: not the same again where it took too long, and with time between where there is no room.
_HEADERS = {408: {"x-should-retry": "false"}, 429: {"retry-after": "1"}, 503: {"retry-after": "5"}}
# Pydantic reports each arm of a union on its own; people want the union.
_UNIONS = {
    "prompt": "must be a string, a list of strings, a list of token ids, or a list of lists of token ids",
    "stop": "must be a string or a list of strings",
    "content": "must be a string, a list of parts, or null",
    "tool_choice": "must be a string or an object",
}
_UNIONS_OF = {"/diagnose_prefix": _UNIONS | {"prompt": "must be a string or a list of token ids"}}


class Error(pydantic.BaseModel):
    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(pydantic.BaseModel):
    """For /openapi.json only: what is sent comes from `error_body`."""

    error: Error


# Of every operation; without it FastAPI would describe its own answer with status 422.
DOCUMENTED: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": description}
    for status, description in (("4XX", "A mistake of the client's"), ("5XX", "The server cannot serve it"))
}


def error_body(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status) or http.HTTPStatus(status).phrase.title().replace(" ", "") + "Error"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, media_type="application/json")


def error_response(
    message: str, status: int, param: str | None = None, headers: dict[str, str] | None = None
) -> Response:
    # Messages quote what clients sent, which may hold lone surrogates: JSON cannot.
    message = message.encode("utf-8", "replace").decode()
    param = param if param is None else param.encode("utf-8", "replace").decode()
    return json_response(error_body(message, status, param), status, _HEADERS.get(status, {}) | (headers or {}))


def exception_body(error: Exception) -> tuple[dict[str, Any], int]:
    """Error object and status for what can happen while generating."""
    if isinstance(error, RequestError):
        return error_body(str(error), error.status, error.param), error.status
    if isinstance(error, EngineFailedError):
        return error_body(f"The engine cannot serve requests: {error}", 503), 503
    logger.error("unexpected error in a request", exc_info=error)
    return error_body("Internal server error; the server's log has the details.", 500), 500


def _validation_message(error: RequestValidationError, unions: dict[str, str]) -> tuple[str, str | None]:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return f"The request body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}", None
    path = list(first["loc"][1:])  # behind "body"
    if not path and first["type"] != "string_unicode":
        return "The request needs a JSON object as its body, and the header content-type: application/json.", None
    if first["type"] == "string_unicode":  # of a mistake in a field's name pydantic tells the object only
        where = ".".join(map(str, path)) or "The request body"
        return f"{where} holds half of a surrogate pair, in a text or a field's name, which is no valid Unicode", None
    field = str(path[0])
    if first["type"] == "missing":
        return f"{'.'.join(map(str, path))} is missing", field
    is_union = len(error.errors()) > 1
    name = next((str(part) for part in reversed(path) if part in unions and is_union), None)
    where = ".".join(str(part) for part in path if name is None or isinstance(part, int) or part in (field, name))
    if name is not None:
        return f"{'.'.join([field] if name == field else [field, *map(str, path[1:2]), name])} {unions[name]}", field
    return f"{where}: {first['msg']}", field


def install(app: FastAPI) -> None:
    """Error objects instead of FastAPI's own answers."""

    @app.exception_handler(RequestValidationError)
    async def validation(request: Request, error: RequestValidationError) -> Response:
        message, param = _validation_message(error, _UNIONS_OF.get(request.url.path, _UNIONS))
        return error_response(message, 400, param)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code == 404:
            message = f"There is no {request.method} {request.url.path} here."
        elif error.status_code == 405:
            message = f"{request.url.path} does not take {request.method}."
        return error_response(message, error.status_code, headers=error.headers)

    @app.exception_handler(RequestError)
    @app.exception_handler(EngineFailedError)
    async def request_error(_: Request, error: Exception) -> Response:
        body, status = exception_body(error)
        return error_response(body["error"]["message"], status, body["error"]["param"])

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        body, status = exception_body(error)
        return json_response(body, status)
