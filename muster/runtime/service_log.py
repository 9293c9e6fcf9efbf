"""Structured logging of the services: a sentence per line, its `action` and the ids it is about.

Lines are JSON objects, or readable text on a terminal. Records of the standard library's logging
come out in the same form.
"""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

from muster.runtime.stderr_messages import print_stderr


def configure(service: str) -> None:
    """Log to standard error from now on, with `service` in every line."""
    shared: list[structlog.types.Processor] = [
        _drop_none,
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendering: list[structlog.types.Processor] = (
        # structlog's usual traceback on a terminal shows the values of variables, secrets included.
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if sys.stderr.isatty()
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    formatter = structlog.stdlib.ProcessorFormatter
    handler = _Handler()
    handler.setFormatter(
        formatter(
            foreign_pre_chain=shared, processors=[formatter.remove_processors_meta, *rendering]
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    structlog.configure(
        processors=[*shared, formatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)


def _drop_none(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Leave out ids that do not apply, such as the rank of an event of the whole job."""
    return {name: value for name, value in event.items() if value is not None}


class _Handler(logging.Handler):
    """Writes lines; a full disk loses lines, but does not stop the service."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print_stderr(self.format(record))
        except Exception:  # noqa: BLE001  as the standard library's handlers do
            self.handleError(record)
