"""The agent's HTTP API on its Unix socket, for the control plane, Envoy's checks and kubelets.

``/live`` 200 while the agent lives · ``/ready`` 200 when proven, else 503 and what is missing ·
``/routable`` 200 while the gateway may reach the engine (Envoy's health check) · ``/status`` ·
``/events?after=N`` streamed · ``/logs`` · POST ``/heat`` ``/drain`` ``/stop``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.core.localhttp import Request, Response, json_response
from preheat.core.localhttp import serve as serve_socket

if TYPE_CHECKING:
    from preheat.replica.agent import Agent


async def serve(agent: Agent) -> asyncio.Server:
    async def handle(request: Request) -> Response:
        return _get(agent, request) if request.method == "GET" else _post(agent, request)

    return await serve_socket(Path(agent.plan.agent_socket), handle)


def _get(agent: Agent, request: Request) -> Response:
    match request.path:
        case "/routable":
            return Response(200 if agent.routable else 503, b"", "text/plain")
        case "/live":
            return json_response({"status": "live"})
        case "/ready":
            return json_response(
                {"ready": agent.ready, "missing": agent.missing()}, 200 if agent.ready else 503
            )
        case "/status":
            return json_response(_status(agent))
        case "/logs":
            return Response(200, "\n".join(agent.begun.ring.lines()).encode(), "text/plain")
        case "/events":
            after = request.query.get("after", "0")
            if not (after.isdecimal() and len(after) < 10):
                return json_response({"error": f"after={after!r} is not a number"}, 400)
            return Response(
                content_type="application/x-ndjson", stream=agent.events.follow(int(after))
            )
    return json_response({"error": f"nothing at {request.path}"}, 404)


def _post(agent: Agent, request: Request) -> Response:
    orders = {"/heat": agent.order_heat, "/drain": agent.order_drain, "/stop": agent.order_stop}
    if (order := orders.get(request.path)) is None:
        return json_response({"error": f"no order {request.path}"}, 404)
    order()
    return json_response({"ordered": request.path[1:]}, 202)


def _status(agent: Agent) -> dict[str, object]:
    return {
        "replica": agent.plan.replica,
        "start_id": agent.plan.start_id,
        "model": agent.plan.model,
        "version": agent.plan.version,
        "state": agent.state,
        "missing": agent.missing(),
        "reason": agent.reason,
        "engine_pid": agent.begun.engine_pid,
        "engine": agent.plan.launch.build,
        "events_lost": agent.events.file_error,
        "log_lines_dropped": agent.begun.ring.dropped_lines,
    }
