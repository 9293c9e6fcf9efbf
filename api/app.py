"""The application: routes, problem documents and OpenAPI around one `FrontDesk`."""

from http import HTTPStatus
from typing import Any

from fastapi import Depends, FastAPI

from api.access import PREFIX, refuse_undeclared
from api.desk import FrontDesk
from api.door import BODY_LIMIT_BYTES
from api.handlers import install
from api.head import HeadAsGet
from api.queries import refuse_unknown_query
from api.responses import ANY, refusals
from api.routes import audit, health, incarnations, jobs, logs, pool, removal, tokens
from api.schemas import ProblemView
from api.yaml_bodies import YamlAsJson


class _Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Return the document, with the one schema that no route answers with itself."""
        document = super().openapi()
        problem = ProblemView.model_json_schema(ref_template="#/components/schemas/{model}")
        nested = problem.pop("$defs", {})
        document["components"]["schemas"] |= {"ProblemView": problem, **nested}
        return document


def build(desk: FrontDesk) -> FastAPI:
    """Return the application. It holds no state but `desk`, and does not guard itself."""
    app = described(desk.version)
    app.state.desk = desk
    return app


def described(version: str) -> FastAPI:
    """Return the application without a desk: it knows what it would serve, and serves nothing."""
    app = _Application(
        title="Muster",
        version=version,
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        max_body_size=BODY_LIMIT_BYTES,
        dependencies=[Depends(refuse_unknown_query)],
        generate_unique_id_function=lambda route: route.name,
        # Of every route: none takes a query it does not know.
        responses={**refusals(HTTPStatus.UNPROCESSABLE_ENTITY), **ANY},
    )
    install(app)
    app.add_middleware(HeadAsGet)
    app.add_middleware(YamlAsJson)
    for module in (health, jobs, pool, audit, incarnations, logs, removal, tokens):
        refuse_undeclared(module.router)
        app.include_router(module.router)
        app.include_router(module.router, prefix=PREFIX, include_in_schema=False)
    return app
