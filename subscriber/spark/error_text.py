"""What exceptions of Spark say of their cause, without values of rows.

An exception of a data source, of a task or of foreachBatch is text in Spark's own exception, with the traceback. The
texts of this package have no values of rows, so its errors are raised again. Of others the class and the place remain.
"""

from __future__ import annotations

import re

from subscriber import errors
from subscriber.errors import SubscriberError

_FRAME = re.compile(r'^ +File "([^"]+)", line (\d+)', re.MULTILINE)  # of a traceback
_CLASS = re.compile(r"^[A-Za-z_][\w.]*(?=:|$)", re.MULTILINE)  # of its exception, after the last frame
_CONDITION = re.compile(r"(?:\[STREAM_FAILED\] .*? terminated with exception: )?(\[[A-Z0-9_.]+\])")

# An error of this package, after the traceback or in raise_error(), up to what Spark adds.
_OWN = re.compile(
    r"(?:[\w.]+: )?(?:\[USER_RAISED_EXCEPTION\] )?subscriber\.errors\.(?P<name>\w+): (?P<message>.*)"
    r"(?:\nDETAIL:  (?P<detail>(?:.|\n)*?))?(?:\nHINT:  (?P<hint>(?:.|\n)*?))?(?:\nCONTEXT:  (?:.|\n)*?)?"
    r"(?:\s+SQLSTATE: |\n=== Streaming Query ===|\s*\Z)"
)
_STACK = "\n\nJVM stacktrace:"


def cause(text: str) -> str | None:
    """Return what an exception of Spark says of its cause: of a Python exception its class and place, but no values."""
    frames = list(_FRAME.finditer(text))
    match = _CLASS.search(text, frames[-1].end()) if frames else None
    if match is None:
        return next(iter(text.splitlines()), None)
    return f"{match[0]} in {frames[-1][1]}, line {frames[-1][2]}"


def own_error(text: str) -> SubscriberError | None:
    """Return the error of this package that is the cause of an exception of Spark. None: another one is."""
    text = text.partition(_STACK)[0]
    frames = list(_FRAME.finditer(text))
    start = _CLASS.search(text, frames[-1].end()) if frames else None
    match = _OWN.match(text, start.start() if start is not None else 0)
    kind = getattr(errors, match["name"], None) if match is not None else None
    # Classes with constructors of their own have more data, and the text of a ServerError may have values.
    if match is None or not isinstance(kind, type) or not issubclass(kind, SubscriberError):
        return None
    if kind.__init__ is not SubscriberError.__init__:
        return None
    return kind(match["message"].strip(), detail=match["detail"], hint=match["hint"])


def readable_error(error: Exception) -> SubscriberError:
    """Return an error that says what an exception of Spark does, and needs no JVM for it.

    Args:
        error: an exception of py4j or pyspark, while its session is open.
    """
    from pyspark.errors import AnalysisException

    java = getattr(error, "java_exception", None)
    text = str(error if java is None else java.getMessage()).partition(_STACK)[0]
    if (own := own_error(text)) is not None:
        return own
    detail = cause(text)
    if not isinstance(error, AnalysisException) and _FRAME.search(text) is None:
        # The first line may have a value.
        condition = _CONDITION.match(text)
        detail = f"{type(error).__name__} {condition[1]}" if condition is not None else type(error).__name__
    return SubscriberError(
        "Spark could not finish the work",
        detail=detail,
        hint="To see the text of the exception, which may have values of rows, catch it within the block of "
        "spark_session().",
    )
