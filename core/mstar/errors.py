"""Errors by audience: a client (RequestError), a plugin's author (PluginError), an operator (ConfigError).

Every message names the value, the limit and the remedy. Knows nothing about HTTP beyond the status a client
should see. Used in every process.
"""

from __future__ import annotations

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class MstarError(Exception):
    """Base of every error mstar raises on purpose."""


class ConfigError(MstarError):
    """A setting the operator can change is wrong; the message says to what."""


class PluginError(MstarError):
    """A plugin breaks the contract; the message names the plugin (and hook, node, port or walk)."""


class RequestError(MstarError):
    """A request cannot be served; the client sees `status`, `message`, `param` and `code`.

    Args:
        message: what is wrong, with value, limit and remedy.
        status: HTTP status, 400 by default.
        param: dotted name of the offending field, if one field is to blame.
        code: short machine-readable reason, such as "context_length_exceeded".
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code

    @property
    def type(self) -> str:
        """The OpenAI error type that goes with the status."""
        if self.status >= 500:
            return "server_error"
        return _TYPES.get(self.status, "invalid_request_error")
