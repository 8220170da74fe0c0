"""The OpenAI-compatible HTTP application."""

import time
import uuid
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

import jaxkv
from jaxkv.core.errors import RequestError
from jaxkv.server import dashboard, errors
from jaxkv.server.callers import caller_of
from jaxkv.server.metrics import metrics_registry
from jaxkv.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    DiagnosePrefixRequest,
    GenerationRequest,
    TokenizeRequest,
)
from jaxkv.server.responses import ChatResponses, CompletionResponses, Responses
from jaxkv.server.serving import Prompt, Serving
from jaxkv.server.streaming import EventStream, gathered
from jaxkv.server.tools import checked_names

_GENERATED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "OpenAI's object; with `stream`, server-sent events of chunks, then `data: [DONE]`",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {}}},
    }
}


def create_app(serving: Serving) -> FastAPI:
    """The application for one running engine; `limits.guard` is what belongs in front of it."""
    engine = serving.engine
    app = FastAPI(
        redirect_slashes=False,  # to whatever host the client named
        title="jaxkv", version=jaxkv.__version__, docs_url=None, redoc_url=None, strict_content_type=False,
        responses=errors.DOCUMENTED,
    )  # fmt: skip
    errors.install(app)

    @app.head("/health", include_in_schema=False)
    @app.head("/ping", include_in_schema=False)
    @app.get("/health")
    @app.get("/ping")
    async def health() -> Response:
        if engine.failed is not None:
            return errors.error_response(f"The engine cannot serve requests: {engine.failed}", 503)
        return Response(status_code=200)

    registry = metrics_registry(
        lambda: engine.snapshot,
        serving.model_names[0],
        serving.max_model_len,
        serving.cache_config,
        lambda: engine.num_refused,
        serving.traffic,
    )

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics")
    def metrics() -> Response:
        # In a thread, as it takes some 6 ms. Never as OpenMetrics, which a Prometheus prefers: prometheus-client 0.26
        # writes the colon of vLLM's names as an underscore there.
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    @app.get("/dashboard", include_in_schema=False)
    async def dashboard_page() -> Response:
        return dashboard.page()

    @app.get("/dashboard/data", include_in_schema=False)
    def dashboard_data() -> Response:
        # In a thread, as /metrics.
        return errors.json_response(dashboard.data(serving), headers={"cache-control": "no-store"})

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": engine.num_running}

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(reset_running_requests: bool = False, reset_external: bool = False) -> dict[str, bool]:
        # There is no external cache; leaving it as it is is all that can be done to it.
        return {"success": await engine.reset_prefix_cache(preempt_running=reset_running_requests)}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        return errors.json_response(serving.tokenizer_info())

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": jaxkv.__version__}

    @app.get("/v1/models")
    async def models() -> Response:
        return errors.json_response({"object": "list", "data": [_card(serving, name) for name in serving.model_names]})

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        serving.check_model(model_id)
        return errors.json_response(_card(serving, model_id))

    @app.post("/v1/completions", responses=_GENERATED)
    async def completions(body: CompletionRequest, http: Request) -> Response:
        return await _generate(serving, body, http, CompletionResponses)

    @app.post("/v1/chat/completions", responses=_GENERATED)
    async def chat_completions(body: ChatCompletionRequest, http: Request) -> Response:
        return await _generate(serving, body, http, ChatResponses)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        return errors.json_response(await _tokenize(serving, body))

    @app.post("/diagnose_prefix")
    async def diagnose_prefix(body: DiagnosePrefixRequest) -> Response:
        body.check()
        prompt = await _prompt(serving, body)
        return errors.json_response(await serving.explain_prefix(prompt, body.cache_salt))

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        serving.check_model(body.model)
        wrong = [token for token in body.tokens if not 0 <= token < serving.vocab_size]
        if wrong:
            raise RequestError(
                f"tokens has id {wrong[0]}; ids of this model are 0 to {serving.vocab_size - 1}", param="tokens"
            )
        return errors.json_response({"prompt": serving.tokenizer.decode(body.tokens, skip_special_tokens=False)})

    return app


async def _generate(serving: Serving, body: GenerationRequest, http: Request, kind: type[Responses]) -> Response:
    serving.check_model(body.model)
    body.check(serving.tool_format)
    serving.engine.check_room()  # before the work of tokenising
    prompts = await serving.prompts(body)
    name = uuid.uuid4().hex
    response_id = f"{kind.id_prefix}-{body.request_id or name}"
    model = body.model or serving.model_names[0]
    responses = kind(response_id, model, int(time.time()), serving.tokenizer, body, prompts)
    stream = await serving.submit(body, prompts, name, caller_of(http.scope, body.user))
    if body.stream:
        return EventStream(stream, responses)
    return await gathered(http, stream, responses)


async def _tokenize(serving: Serving, body: TokenizeRequest) -> dict[str, Any]:
    ids = (await _prompt(serving, body)).token_ids
    texts = [serving.tokenizer.token_text(i) for i in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": serving.max_model_len, "tokens": list(ids), "token_strs": texts}


async def _prompt(serving: Serving, body: TokenizeRequest) -> Prompt:
    serving.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if isinstance(body.prompt, list):
        return Prompt(None, tuple(body.prompt))
    if body.messages is None:
        return await serving.encode(body.prompt, body.add_special_tokens is not False)
    continues = bool(body.continue_final_message)
    generates = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    arguments = {"add_generation_prompt": generates, "continue_final_message": continues}
    if body.tools:
        checked_names(body.tools)
        arguments["tools"] = body.tools
    return await serving.chat_prompt(body.messages, arguments, bool(body.add_special_tokens))


def _card(serving: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "jaxkv",
        "root": serving.model_names[0],
        "parent": None,
        "max_model_len": serving.max_model_len,
        "permission": [],
    }
