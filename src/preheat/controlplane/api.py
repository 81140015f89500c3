"""The control plane's HTTP API on its Unix socket (mode 0600): for the CLI, and ``/metrics`` for
Envoy.

GET ``/status`` ``/metrics`` · POST ``/heat?model=NAME`` ``/stop``. What does not belong here:
anything that clients of the models reach.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from preheat.controlplane.fleet import state_of
from preheat.core.localhttp import Request, Response, json_response
from preheat.core.localhttp import serve as serve_socket

if TYPE_CHECKING:
    from preheat.controlplane.replicas import Replica
    from preheat.controlplane.runtime import ControlPlane


async def serve(control: ControlPlane) -> asyncio.Server:
    async def handle(request: Request) -> Response:
        match request.method, request.path:
            case "GET", "/status":
                return json_response(status(control))
            case "GET", "/metrics":
                return Response(
                    200, control.metrics().render(), "text/plain; version=0.0.4; charset=utf-8"
                )
            case "POST", "/heat":
                return _heat(control, request.query.get("model", ""))
            case "POST", "/stop":
                control.order_stop()
                return json_response({"ordered": "stop"}, 202)
        return json_response({"error": f"nothing at {request.method} {request.path}"}, 404)

    return await serve_socket(control.paths.admin_socket, handle)


def _heat(control: ControlPlane, model: str) -> Response:
    known = [m.name for m in control.fleet.spec.models]
    if model not in known:
        return json_response({"error": f"no model {model!r}; there are: {', '.join(known)}"}, 404)
    control.order_heat(model)
    return json_response({"ordered": "heat", "model": model}, 202)


def status(control: ControlPlane) -> dict[str, Any]:
    """What ``preheat status`` shows. Fields are only ever added."""
    fleet = control.fleet
    table = fleet.routing_table()
    listener = fleet.listener
    return {
        "ready": not table.missing and control.routing.published == table,
        "missing": list(table.missing),
        "url": control.url,
        "gateway": {
            "alive": control.gateway.alive,
            "restarts": control.gateway.restarts,
            "listen": f"{listener.host}:{listener.port}",
            "tls": bool(listener.certificate_pem),
            "keys": len(listener.keys),
        },
        "records": {"received": control.records.received, "dropped": control.records.dropped},
        "models": [
            {
                "name": route.name,
                "state": "ready" if route.state == "ready" else state_of(fleet.places(route.name)),
                "replicas": [_replica(control, place) for place in fleet.places(route.name)],
            }
            for route in table.models
        ],
    }


def _replica(control: ControlPlane, place: Replica) -> dict[str, Any]:
    start = place.start
    last = control.starts.last.get(place.name)
    return {
        "name": place.name,
        "version": place.version.name,
        "engine": place.version.engine.kind,
        "traffic_share": place.version.traffic_share,
        "start_id": start.start_id if start else None,
        "state": state_of([place]),
        "waiting_for": place.busy or place.waiting_for,
        "failures": place.failures,
        "last_reason": place.failure.reason if place.failure else "",
        "given_up": place.given_up,
        "last_cold_start_s": last.time_to_first_token_s if last else None,
        "agent_socket": str(start.agent_socket) if start else None,
    }
