"""The server as an ASGI application: all routes, behind the guard."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from samkv_integrations import figures
from samkv_integrations.errors import SamkvError
from samkv_integrations.server import ask, chunks, completions, page
from samkv_integrations.server.documented import ERRORS
from samkv_integrations.server.failures import Failure
from samkv_integrations.server.guard import Guard, Rules
from samkv_integrations.server.service import Service

_DESCRIPTION = """OpenAI's API in front of a local model. Texts of cached chunks are found in
prompts, and answered from their caches."""


def create_app(service: Service, rules: Rules) -> FastAPI:
    """The application; ``/openapi.json`` describes its routes."""
    app = FastAPI(
        title="samkv", version=figures.version(), description=_DESCRIPTION,
        docs_url=None, redoc_url=None,  # pages that load scripts from elsewhere
        redirect_slashes=False,  # an error is said, in OpenAI's form
        telemetry={"logs": False},  # messages of errors, which may hold a prompt
    )  # fmt: skip
    app.add_middleware(Guard, rules=rules, metrics=service.metrics)
    _add_handlers(app)

    @app.get("/health", tags=["server"])
    async def health() -> dict[str, str]:
        """Whether the server is up."""
        return {"status": "ok"}

    app.include_router(page.router())
    app.include_router(_guarded(service))
    return app


def _guarded(service: Service) -> APIRouter:
    """The routes that need a key, where there are keys; the guard has asked for it."""
    bearer = Depends(HTTPBearer(auto_error=False))  # for the documentation alone
    routes = APIRouter(responses=ERRORS, dependencies=[bearer])
    for part in (completions, chunks, ask):
        routes.include_router(part.router(service))

    @routes.get("/metrics", tags=["server"], response_class=Response)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.text, media_type=CONTENT_TYPE_LATEST)

    @routes.get("/v1/models", tags=["models"])
    async def models() -> dict[str, Any]:
        """The models, of which there is one."""
        return {"object": "list", "data": [_model(service)]}

    @routes.get("/v1/models/{model:path}", tags=["models"])
    async def model(model: str) -> dict[str, Any]:
        """One model."""
        service.require_model(model)
        return _model(service)

    return routes


def _model(service: Service) -> dict[str, Any]:
    window = service.tenancy.scheduler.model.context_window
    return {
        "id": service.model_name, "object": "model", "created": service.since, "owned_by": "samkv",
        "max_model_len": window,
    }  # fmt: skip


def _add_handlers(app: FastAPI) -> None:
    """Errors in OpenAI's shape."""

    @app.exception_handler(Failure)
    async def failed(request: Request, error: Failure) -> JSONResponse:
        request.state.failure = error
        return error.response

    @app.exception_handler(SamkvError)
    async def refused(request: Request, error: SamkvError) -> JSONResponse:
        request.state.failure = failure = Failure.of(error)
        return failure.response

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return Failure.of_body(error.errors()).response

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 400:  # FastAPI's, of a body that Python cannot decode
            message = (
                "the body is no JSON that can be read: it has to be UTF-8, with numbers of at most "
                "4,300 digits, and lists and objects that are not too deep"
            )
            return Failure(status=400, message=message).response
        what = f"{request.method} {request.url.path[:80]}"
        message = f"{what}: {error.detail}; /openapi.json lists what there is"
        return Failure(status=error.status_code, message=message, code="not_found").response
