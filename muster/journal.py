"""How the services log: one sentence a line, with its `action` and the ids it is about.

On a terminal for people, elsewhere one JSON object a line. Third-party libraries that use the
standard library's logging come out in the same form.
"""

import logging
import sys
import time
from collections.abc import Collection, MutableMapping
from typing import Any

import structlog

from muster.remarks import remark
from muster.repeats import Repeats


def configure(
    service: str, level: int = logging.INFO, *, summed_up: Collection[str] = frozenset()
) -> None:
    """Set up logging of this process to standard error; `service` names it in every line.

    Lines whose action is to be `summed_up` are counted where there are too many: see `Repeats`.
    """
    shared: list[structlog.types.Processor] = [
        _without_nothing,
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    for_people = sys.stderr.isatty()
    last: list[structlog.types.Processor] = (
        # The formatter for people would show the values of all variables, secrets among them.
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if for_people
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    handler = _Remarks()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.basicConfig(handlers=[handler], level=level, force=True)
    logging.getLogger("alembic").setLevel(logging.WARNING)  # its plug-ins are nobody's news
    structlog.configure(
        # Our own lines do not go through the standard library, which doubles what each costs.
        processors=[Repeats(time.monotonic, summed_up), *shared, *last],
        logger_factory=_Remarker,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)


def _without_nothing(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Leave out what a line is not about, such as the rank of what befalls a whole job."""
    return {name: value for name, value in event.items() if value is not None}


class _Remarker:
    """Makes a remark of each line; a full disk costs that, and no service."""

    def __init__(self, *_: object) -> None:
        pass

    def msg(self, line: str) -> None:
        remark(line)

    debug = info = warning = error = critical = exception = msg


class _Remarks(logging.Handler):
    """The same for the standard library's records."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            remark(self.format(record))
        except Exception:  # noqa: BLE001  as in the standard library: a bad record is told, not raised
            self.handleError(record)
