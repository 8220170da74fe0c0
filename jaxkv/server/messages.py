"""The messages of a chat: roles, content in parts, and earlier calls of tools, brought into the form that templates take."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from jaxkv.core.errors import RequestError
from jaxkv.server.tools import plain_calls

# One wrong entry is enough: pydantic reports all, at some 10 us each, on the event loop (14 s for a body of 1.5 MB).
FIRST_MISTAKE = Field(fail_fast=True)
Objects = Annotated[list[dict[str, Any]], FIRST_MISTAKE]
_ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    role: str = Field(json_schema_extra={"enum": list(_ROLES)})
    content: str | Objects | None = None

    def plain(self, place: str) -> dict[str, Any]:
        """For the chat template: content as one text. Raises RequestError for what is no message of OpenAI's.

        Args:
          place: where it stands in the request, for messages of errors.
        """
        self._check_role(place)
        message = {**(self.model_extra or {}), "role": self.role, "content": self._text(place)}
        if message.get("tool_calls") is not None:
            message["tool_calls"] = plain_calls(message["tool_calls"], f"{place}.tool_calls")
        return message

    def _check_role(self, place: str) -> None:
        if self.role not in _ROLES:
            deprecated = ", which is deprecated and not supported" if self.role == "function" else ""
            raise RequestError(
                f"{place}.role is {self.role[:80]!r}{deprecated}; choose {', '.join(_ROLES)}", param=f"{place}.role"
            )
        if self.role == "tool" and not isinstance((self.model_extra or {}).get("tool_call_id"), str):
            raise RequestError(
                f"{place}.tool_call_id must be a string: which call this is the result of",
                param=f"{place}.tool_call_id",
            )

    def _text(self, place: str) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        texts = []
        for i, part in enumerate(self.content):
            text = part.get("text")
            if part.get("type", "text") != "text" or not isinstance(text, str):
                raise RequestError(
                    f"{place}.content[{i}]: a content part of type {str(part.get('type'))[:80]!r} is not supported: "
                    "only text parts with a text are",
                    param=f"{place}.content",
                )
            texts.append(text)
        return "\n".join(texts)
