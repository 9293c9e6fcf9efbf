"""The service process: settings, database, application, uvicorn; and the application alone."""

import gc
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import structlog
import uvicorn
from anyio import CapacityLimiter
from fastapi import Depends, FastAPI
from prometheus_client import CollectorRegistry

from api.access.auth import Authenticator, TokenCache
from api.access.connections import HEADERS_LIMIT_BYTES, LimitedProtocol
from api.access.middleware import BODY_LIMIT_BYTES, AccessMiddleware
from api.access.rate_limits import RateLimiter
from api.dependencies import PREFIX, AppState, CoordinatorHandle, DiskReserve
from api.errors import install
from api.metrics import ScrapeCollector, read_scrape
from api.page import routes as page
from api.routes import deletion, hosts, jobs, logs, pool, service, watch
from api.schema import ANY, add_schemas, refusals, refuse_unknown_query
from api.startup_checks import check_certificate, check_listening
from api.streams import Feeds, JobCache, JobState
from api.submission import Outcomes, SubmissionQueue, Submitter
from database.engine import Database
from database.history import History
from database.hosts import Hosts
from database.idempotency import Answers
from database.jobs import Jobs, NewJob
from database.leases import Leases
from database.records import utc_now
from database.replication.outbox import Replication
from database.tokens import Tokens
from muster.cluster.identity import node_id
from muster.cluster.members import ServiceCluster
from muster.contracts.errors import MusterError
from muster.contracts.interpreter import VERSION
from muster.contracts.job.status import JobId
from muster.contracts.settings.paths import DataDir
from muster.contracts.settings.services import (
    TOKEN,
    AccessSettings,
    ServiceSettings,
    is_issued_token,
)
from muster.host import processes
from muster.host.limits import usable_processors
from muster.host.private import make_private
from muster.objects.client import BRIEF_RETRY_SECONDS, S3Client
from muster.runtime import service_log
from muster.runtime.stderr_messages import print_stderr

_LOG: Final = structlog.get_logger("api")

LOG_READERS: Final = 8
"""Threads that read logs for streams, so that these do not hold up other routes."""

LOG_SEARCHES: Final = 4
"""Threads that search logs; one search may take two seconds."""

CONNECTIONS_LIMIT: Final = 640
"""uvicorn answers 503 beyond. The usual limit of open files is 1024, and logs need some as well."""

SHUTDOWN_SECONDS: Final = 4
"""For answers on their way after SIGTERM; streams end at once."""


class _Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, with schemas made from the msgspec structs."""
        if self.openapi_schema is None:
            add_schemas(super().openapi())
        return self.openapi_schema or {}


def create_app() -> FastAPI:
    """Return the application without its state: it can be described, but not served."""
    app = _Application(
        title="Muster",
        version=VERSION,
        docs_url=None,  # its page would load scripts from another host: see api/routes/service.py
        redoc_url=None,
        redirect_slashes=False,
        max_body_size=BODY_LIMIT_BYTES,
        dependencies=[Depends(refuse_unknown_query)],
        generate_unique_id_function=lambda route: route.name,
        # For every route: each refuses a query parameter that it does not know.
        responses={**refusals(422), **ANY},
    )
    install(app)
    app.include_router(service.page_router)
    app.include_router(page.router)
    app.include_router(page.open_router)
    # Before jobs, whose /jobs/{job_id} would take the rest for an id.
    modules = (service, hosts, watch, jobs, pool, logs, deletion)
    for router in (*(module.router for module in modules), service.token_router):
        app.include_router(router)
        app.include_router(router, prefix=PREFIX, include_in_schema=False)
    return app


def serve() -> int:
    """Serve until SIGTERM or Ctrl-C; return the exit code."""
    processes.exit_with_parent(os.environ)
    service_log.configure("api")
    os.umask(0o077)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    processes.unblock_sigint()
    processes.await_start(os.environ)
    try:
        settings = ServiceSettings.read(os.environ, cores=usable_processors())
        access = AccessSettings.read(os.environ)
        if is_issued_token(os.environ):
            print_stderr(
                f"api: {TOKEN} is a token that a Muster service created, so this service ignores "
                "it. Unset it here, or choose a token of your own (`openssl rand -hex 32`)"
            )
        if access.tls_certfile is not None:
            check_certificate(access.tls_certfile, access.tls_keyfile)
        make_private(settings.data_dir)
        database = Database.open(settings.database, replication=Replication.of(settings))
        try:
            _run(settings, access, database)
        finally:
            database.close()
    except MusterError as error:
        print_stderr(f"api: {error}")
        return 1
    return 0


def _run(settings: ServiceSettings, access: AccessSettings, database: Database) -> None:
    tokens = TokenCache(database, time.monotonic)
    listener = _listen(settings, access, tokens)
    app = create_app()
    app.state.app_state = state = _build_state(
        settings, database, tokens, is_closing=lambda: server.should_exit
    )
    authenticator = Authenticator(
        tokens=tokens,
        clock=utc_now,
        own_uid=os.geteuid(),
        require_token=access.require_token,
        token_sha256=access.token_sha256,
    )
    guarded = AccessMiddleware(
        app,
        authenticator=authenticator,
        limiter=RateLimiter(
            per_second=access.requests_per_second,
            at_once=access.requests_at_once,
            monotonic=time.monotonic,
        ),
        hosts={settings.host, *access.allowed_hosts},
        requests=state.requests,
        acknowledge=database.acknowledge,
    )
    config = uvicorn.Config(
        guarded,
        http=cast(
            Any,
            partial(
                LimitedProtocol,
                {},
                authenticator.is_own_user,
                may_be_relayed=settings.nodes is not None,
            ),
        ),
        h11_max_incomplete_event_size=HEADERS_LIMIT_BYTES,
        limit_concurrency=CONNECTIONS_LIMIT,
        ws="none",
        proxy_headers=False,  # callers are identified by address, which no header may replace
        server_header=False,
        access_log=False,
        log_config=None,
        log_level=logging.WARNING,
        ssl_certfile=access.tls_certfile,
        ssl_keyfile=access.tls_keyfile,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    server = uvicorn.Server(config)
    host, port = listener.getsockname()[:2]
    scheme = "https" if access.tls_certfile else "http"
    url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    _LOG.info(f"listens on {url}", action="listening", url=url)
    # A garbage collection through everything that was imported would take a tenth of a second.
    gc.freeze()
    S3Client.retry_seconds = BRIEF_RETRY_SECONDS
    server.run(sockets=[listener])


def _listen(settings: ServiceSettings, access: AccessSettings, tokens: Tokens) -> socket.socket:
    address = check_listening(settings, access, tokens.is_any_valid)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, settings.port), family=family, backlog=1024)
    except OSError as error:
        raise MusterError(
            f"cannot listen on {settings.host} port {settings.port} ({error.strerror}): stop the "
            "process that listens there, or choose another port with MUSTER_PORT"
        ) from error


def _build_state(
    settings: ServiceSettings, database: Database, tokens: Tokens, is_closing: Callable[[], bool]
) -> AppState:
    started = time.monotonic()
    job_rows, history, leases = Jobs(database), History(database), Leases(database)
    data_dir = DataDir(settings.data_dir)
    node = node_id(data_dir.node_key)

    def read_state(job_id: JobId) -> JobState | None:
        job = job_rows.find(job_id)
        return JobState(job, history.ranks(job_id)) if job else None

    def checkpoint_dir_of(job_id: JobId) -> str | None:
        job = job_rows.find(job_id)
        return job.spec.checkpoint_dir if job else None

    hosts = Hosts(database)
    changes = database.changes if database.listen(lambda: None) else lambda: None
    coordinator = CoordinatorHandle(leases.current, time.monotonic)
    disk_reserve = DiskReserve(data_dir.disk_reserve)
    disk_reserve.allocate()

    def store(new_jobs: Sequence[NewJob]) -> Outcomes:
        outcomes = job_rows.create(new_jobs)
        coordinator.wake()
        disk_reserve.allocate()
        return outcomes

    cluster = ServiceCluster(settings, node)
    state = AppState(
        database=database,
        jobs=job_rows,
        history=history,
        hosts=hosts,
        answers=Answers(database),
        tokens=tokens,
        job_cache=JobCache(read_state, time.monotonic, changes),
        feeds=Feeds(),
        log_readers=CapacityLimiter(LOG_READERS),
        log_searches=CapacityLimiter(LOG_SEARCHES),
        coordinator=coordinator,
        node=node,
        submitter=Submitter(
            settings=settings,
            read_cluster=cluster,
            read_members=lambda: cluster.members,
            working_dir=Path.cwd(),
            clock=utc_now,
            random_hex=partial(secrets.token_hex, 16),
            checkpoint_dir_of=checkpoint_dir_of,
            search_path=os.environ.get("PATH"),
        ),
        submission_queue=SubmissionQueue(store),
        data_dir=data_dir,
        disk_reserve=disk_reserve,
        is_closing=is_closing,
        requests=Counter(),
        metrics=CollectorRegistry(),
        clock=utc_now,
        uptime_seconds=lambda: time.monotonic() - started,
    )
    state.metrics.register(ScrapeCollector(partial(read_scrape, state)))
    return state
