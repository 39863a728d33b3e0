"""Every error of the server, in the form that OpenAI's clients read.

``{"error": {"message", "type", "param", "code"}}``, with a status that says whose fault it is.
"""

from collections.abc import Mapping, Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from hicache.engine.engine import EngineClosed, QueueFull
from hicache.engine.openai_types import Unsupported
from hicache.engine.prompts import PromptTooLong
from hicache.engine.streaming import ClientGone
from hicache.errors import InputError

CLIENT_GONE = 499
"""What proxies log for a client that went away; nobody reads it."""


class UnknownModel(InputError):
    """A model that this server does not have."""


def error_body(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, object]:
    """Return an error as JSON."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def failed_body(message: str) -> dict[str, object]:
    """Return the error of a generation that failed on our side."""
    return error_body(message, "server_error")


def install(app: FastAPI) -> None:
    """Make an app answer every error in this form."""
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(UnknownModel, _unknown_model)
    app.add_exception_handler(InputError, _input)
    app.add_exception_handler(QueueFull, _busy)
    app.add_exception_handler(EngineClosed, _busy)
    app.add_exception_handler(ClientGone, _gone)
    app.add_exception_handler(Exception, _bug)


def _answer(
    status: int,
    message: str,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    return JSONResponse(error_body(message, kind, param, code), status, headers=headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in _place(first["loc"]))
    if first["type"] == "json_invalid":
        return _answer(400, f"the body is no JSON: {first.get('ctx', {}).get('error', '')}")
    message = f"{where}: {first['msg']}" if where else f"the body is no JSON object: {first['msg']}"
    return _answer(400, message, param=where or None)


def _place(loc: Sequence[int | str]) -> Sequence[int | str]:
    """Return where a mistake is, without the names of the types that were tried there."""
    loc = loc[1:] if loc[:1] in (("body",), ("query",)) else loc
    for at, part in enumerate(loc):
        if part in ("str", "int") or "[" in str(part):
            return loc[:at]
    return loc


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return _answer(error.status_code, str(error.detail), headers=error.headers)


async def _unknown_model(request: Request, error: Exception) -> JSONResponse:
    return _answer(404, str(error), param="model", code="model_not_found")


async def _input(request: Request, error: Exception) -> JSONResponse:
    param = error.param if isinstance(error, Unsupported) else None
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    return _answer(400, str(error), param=param, code=code)


async def _busy(request: Request, error: Exception) -> JSONResponse:
    return _answer(503, str(error), "server_error", code="overloaded", headers={"Retry-After": "1"})


async def _gone(request: Request, error: Exception) -> JSONResponse:
    return _answer(CLIENT_GONE, "the client closed the request")


async def _bug(request: Request, error: Exception) -> JSONResponse:
    return _answer(500, f"a bug in the server: {type(error).__name__}", "server_error")
