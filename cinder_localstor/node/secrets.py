# SPDX-License-Identifier: Apache-2.0
"""Keeps the CHAP secrets of moves out of every log (hazard H16).

Cinder's target drivers print at debug level what they write for tgtd and what
they call, secrets and all.  The secrets of moves are our own, so we
know what to look for.
"""

import logging
import threading

# By the name of the export
_secrets: dict[str, str] = {}
_lock = threading.Lock()

MASK = '***'


class MaskingFilter(logging.Filter):
    """Replaces all known secrets in a record before it is written."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        masked = mask(message)
        if masked != message:
            record.msg, record.args = masked, ()
        if record.exc_info:
            # An error of a tool holds its whole command.
            found = logging.Formatter().formatException(record.exc_info)
            masked = mask(found)
            if masked != found:
                record.msg = '%s\n%s' % (record.getMessage(), masked)
                record.args = ()
                record.exc_info = record.exc_text = None
        return True


def mask(text: str) -> str:
    """The text without any known secret."""
    for secret in tuple(_secrets.values()):
        text = text.replace(secret, MASK)
    return text


def hide(iqn: str, secret: str) -> None:
    """Let the secret of an export not be logged by this process."""
    if not secret:
        return
    with _lock:
        _secrets[iqn] = secret
        # On the handlers, not on a logger: a logger's filter is not asked
        # for the records of its children.
        for handler in logging.getLogger().handlers:
            if not any(isinstance(known, MaskingFilter)
                       for known in handler.filters):
                handler.addFilter(MaskingFilter())


def forget(iqn: str) -> None:
    """The secret of an export is of no use any more."""
    with _lock:
        _secrets.pop(iqn, None)
