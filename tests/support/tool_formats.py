"""The forms in which families of models write calls of tools, and chat templates that show them."""

import json

from jaxkv.server.tools import ToolFormat

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"type": "string", "maxLength": 6}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, TIME]
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}called for {{ c.function.arguments.city }}{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
HERMES = "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}" + TURNS
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }} [TOOL_CALLS]{% endif %}" + TURNS
ARGUMENTS_BEHIND_NAMES = MISTRAL.replace("[TOOL_CALLS]", "[TOOL_CALLS]NAME[ARGS]")
IDS_BEHIND_NAMES = MISTRAL.replace("[TOOL_CALLS]", "[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]")
LLAMA = '{% if tools %}{"name": function name, "parameters": {}}{{ tools | tojson }}{% endif %}' + TURNS
CALL = {"name": "get_weather", "arguments": {"city": "Zürich"}}
FORMATS = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>"),
    "mistral": ToolFormat("[TOOL_CALLS]", "", as_list=True),
    "mistral, arguments": ToolFormat("[TOOL_CALLS]", "", as_list=True, behind_name=("[ARGS]",)),
    "mistral, ids": ToolFormat("[TOOL_CALLS]", "", as_list=True, behind_name=("[CALL_ID]", "[ARGS]")),
    "llama": ToolFormat("", "", arguments="parameters"),
}
TEMPLATES = dict(zip(FORMATS, (HERMES, MISTRAL, ARGUMENTS_BEHIND_NAMES, IDS_BEHIND_NAMES, LLAMA), strict=True))
MARKED = [name for name in FORMATS if name != "llama"]


def written(name, *calls):
    """Calls as a model of that family writes them."""
    if name == "hermes":
        return "\n".join(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls)
    if name == "mistral":
        return f"[TOOL_CALLS] {json.dumps(calls, ensure_ascii=False)}"
    if name.startswith("mistral, "):
        tags = "[ARGS]" if name == "mistral, arguments" else "[CALL_ID]aZ3bY9c01[ARGS]"
        return "".join(
            f"[TOOL_CALLS]{call['name']}{tags}{json.dumps(call['arguments'], ensure_ascii=False)}" for call in calls
        )
    return "; ".join(
        json.dumps({"name": call["name"], "parameters": call["arguments"]}, ensure_ascii=False) for call in calls
    )
