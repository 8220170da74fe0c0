"""The errors a user can cause. Each says what was wrong, with the values, and which setting to change.

Programs turn a `UserError` into one line on stderr and exit code 2; the server turns a `RequestError` into an OpenAI
error object. Anything else is a bug and keeps its traceback.
"""


class UserError(Exception):
    """Something the user can mend: a flag, a file, a request."""


class ConfigError(UserError):
    """An engine setting that cannot work; the message names the setting and the largest value that would."""


class CheckpointError(UserError):
    """A model file that is missing, damaged or of a kind that is not supported; names file, tensor and expectation."""


class RequestError(UserError):
    """A request that can never be served as it stands.

    Attributes:
      param: the request field at fault, or None.
      status: HTTP status for it (400 unless said otherwise).
    """

    def __init__(self, message: str, *, param: str | None = None, status: int = 400):
        super().__init__(message)
        self.param = param
        self.status = status
