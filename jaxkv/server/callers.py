"""Who sent a request, for statistics and the request log. Nothing is allowed or refused by it: clients may say anything."""

from starlette.types import Scope

# A name is a label in /metrics and a row on the dashboard. Longer ones are cut.
MOST_CHARACTERS = 64
# Where `limits.ApiKeys` tells the name of the key that was sent.
KEY_NAME = "jaxkv.api_key_name"


def caller_of(scope: Scope, user: str | None) -> str | None:
    """The header X-Caller, which a proxy may set for just this; else OpenAI's field `user`; else the name of the API key
    (never the key)."""
    header = next((value for name, value in scope["headers"] if name == b"x-caller"), b"")
    for given in (header.decode("utf-8", "replace"), user, scope.get(KEY_NAME)):
        if name := _cleaned(given or ""):
            return name
    return None


def _cleaned(name: str) -> str:
    """Of printable characters only: no line ends, no lone surrogates, nothing that turns the direction of writing."""
    printable = [c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name.strip()[:MOST_CHARACTERS]]
    return "".join(printable).strip()
