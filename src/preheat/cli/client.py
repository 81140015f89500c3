"""Talks to a running preheat over its admin socket, for the commands that ask or order.

What does not belong here: what is asked, what is printed.
"""

from __future__ import annotations

import asyncio
from typing import Any

from preheat.core import localhttp
from preheat.core.errors import NotRunning, PreheatError
from preheat.core.paths import default_paths


def ask(method: str, target: str, *, timeout_s: float = 5.0) -> Any:
    """The JSON answer of the control plane.

    Raises NotRunning when nobody listens, or it ends before it has answered, and PreheatError when
    it refuses or is silent.
    """
    paths = default_paths()
    socket = paths.admin_socket
    try:
        answer = asyncio.run(localhttp.request(socket, method, target, timeout_s=timeout_s))
        value = answer.json()
    except TimeoutError:
        raise PreheatError(
            f"the preheat in {socket.parent} does not answer within {timeout_s:g} s",
            advice=f"its log is {paths.logs / 'preheat.jsonl'}",
        ) from None
    except PermissionError as error:
        raise PreheatError(
            f"the preheat in {socket.parent} is another user's: {error.strerror}"
        ) from None
    # A value that is cut off is that of one that is ending.
    except (OSError, ValueError):
        raise NotRunning(
            f"no preheat runs in {socket.parent}",
            advice="start one with `preheat serve`, or set PREHEAT_RUNTIME_DIR to where it runs",
        ) from None
    if answer.status >= 400:
        raise PreheatError(value.get("error", f"answer {answer.status}"))
    return value
