"""How the worker's lines look: text by default, one JSON object a line on request. What is told is the same; an event's
fields come with it, so that nobody has to parse a sentence.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from rq.logutils import setup_loghandlers

from worker.settings import Settings

TEXT_FORMAT = "%(asctime)s %(levelname)s %(message)s"
# The engine has a few warnings of its own; it knows no worker.
LOGGERS = ("worker", "engine")


def event(name: str, **fields: object) -> dict[str, object]:
    """The `extra` of a log line that tells an event; fields that are None or empty do not apply and are left out."""
    return {"event": name, "fields": {key: value for key, value in fields.items() if value not in (None, "")}}


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: `ts` (UTC), `level`, `event` (`log` for a mere sentence), `message`, its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        told = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", "log"),
            "message": record.getMessage(),
        }
        return json.dumps(getattr(record, "fields", {}) | told, default=str)


def set_up(settings: Settings, level: str, date_format: str, text_format: str = TEXT_FORMAT) -> None:
    """Send the lines where the settings' form belongs: JSON to standard output, text where RQ sends it."""
    if settings.log_format == "text":
        setup_loghandlers(level, date_format, text_format, name="worker")
        return
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
