"""The application: routes, problem documents and OpenAPI around one `AppState`."""

from typing import Any

from fastapi import Depends, FastAPI

from api.dependencies import PREFIX, AppState
from api.errors import install
from api.middleware import BODY_LIMIT_BYTES, HeadAsGet
from api.routes import deletion, jobs, logs, pages, pool, service
from api.schema import ANY, add_schemas, refusals, refuse_unknown_query
from muster.contracts.interpreter import VERSION


class _Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, with schemas made from the msgspec structs."""
        if self.openapi_schema is None:
            add_schemas(super().openapi())
        return self.openapi_schema or {}


def build(state: AppState) -> FastAPI:
    """Return the application. Its only state is `state`; access control is a middleware."""
    app = described(VERSION)
    app.state.app_state = state
    return app


def described(version: str) -> FastAPI:
    """Return the application without its state: it can be described, but not served."""
    app = _Application(
        title="Muster",
        version=version,
        docs_url=None,  # its page would load scripts from another host: see api/routes/pages.py
        redoc_url=None,
        redirect_slashes=False,
        max_body_size=BODY_LIMIT_BYTES,
        dependencies=[Depends(refuse_unknown_query)],
        generate_unique_id_function=lambda route: route.name,
        # For every route: each refuses a query parameter that it does not know.
        responses={**refusals(422), **ANY},
    )
    install(app)
    app.add_middleware(HeadAsGet)
    app.include_router(pages.router)
    modules = (service, jobs, pool, logs, deletion)
    for router in (*(module.router for module in modules), service.token_router):
        app.include_router(router)
        app.include_router(router, prefix=PREFIX, include_in_schema=False)
    return app
