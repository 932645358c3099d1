"""What a client can be told went wrong, and the one place where it becomes OpenAI's error JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar


_MAX_MESSAGE = 1000


class ServingError(Exception):
    """Base of every error a client sees. `param` is the request's field at fault, where one is."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_server_error"
    code: ClassVar[str | None] = None
    retry_after: ClassVar[int | None] = None  # seconds after which the same request may do better

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(ServingError):
    """The request asks for something that is malformed, contradictory or not served."""

    status = 400
    type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """Prompt and answer together don't fit in the model's context."""

    code = "context_length_exceeded"


class InvocationTokensError(InvalidRequestError):
    """An activated adapter (aLoRA) is asked about a prompt in which it does not begin."""

    code = "invocation_tokens_missing"

    def __init__(self, adapter: str, tokens: Sequence[int], *, param: str | None = None) -> None:
        super().__init__(
            f"adapter {adapter!r} begins at its invocation tokens {list(tokens)}, which the prompt"
            " does not hold",
            param=param,
        )


class AuthenticationError(ServingError):
    """The API key is missing or wrong."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class NotFoundError(ServingError):
    """No such route."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFoundError(NotFoundError):
    """No model or adapter of that name is served."""

    code = "model_not_found"


class MethodNotAllowedError(ServingError):
    """The route exists, but not for this HTTP method."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class PayloadTooLargeError(ServingError):
    """The request's body is over the size limit."""

    status = 413
    type = "invalid_request_error"
    code = "payload_too_large"


class UnsupportedMediaTypeError(ServingError):
    """The request's body says that it is something else than JSON."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class TooManyRequestsError(ServingError):
    """As many requests wait as may."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retry_after = 1


class InternalServerError(ServingError):
    """A fault of ours; the details are in the server's log, not in the answer."""


class UnavailableError(ServingError):
    """The engine has ended, or the server is stopping."""

    status = 503
    type = "service_unavailable_error"
    code = "service_unavailable"


def error_body(error: ServingError) -> dict[str, Any]:
    """OpenAI's error JSON: `{"error": {"message", "type", "param", "code"}}`."""
    message = error.message
    if len(message) > _MAX_MESSAGE:  # it may quote what a client sent
        message = message[:_MAX_MESSAGE] + "..."
    return {
        "error": {
            "message": message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }
