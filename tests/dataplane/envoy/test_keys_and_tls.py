from __future__ import annotations

import http.client
import socket
import ssl
import stat

import pytest
import trustme
from tests.dataplane.envoy.harness import LIMIT_S, Gateway, model
from tests.dataplane.envoy.upstream import Upstream

from preheat.dataplane.envoy.routing import Key

KEYS = (Key("alice", "sk-alice"), Key("bob", "sk-bob"))


def with_keys(gateway: Gateway, engine: Upstream) -> None:
    listener = gateway.on_a_port_of_its_own(keys=KEYS)
    gateway.publish(model("m", engine), listener=listener)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer sk-mallory",
        "Bearer sk-alic",
        "Bearer sk-alicex",
        "Basic sk-alice",
        "Bearer sk-alice, Bearer sk-bob",
    ],
)
def test_without_a_valid_key_the_answer_is_401(
    gateway: Gateway, engine: Upstream, value: str | None
) -> None:
    with_keys(gateway, engine)
    headers = {} if value is None else {"authorization": value}
    for reply in (gateway.ask("m", headers), gateway.get("/v1/models", headers)):
        assert (reply.status, reply.code) == (401, "invalid_api_key")
        assert reply.json()["error"]["type"] == "authentication_error"
    assert engine.received == []


@pytest.mark.parametrize("key", KEYS)
def test_a_key_opens_the_models_and_stays_at_the_gateway(
    gateway: Gateway, engine: Upstream, key: Key
) -> None:
    with_keys(gateway, engine)
    headers = {"authorization": f"Bearer {key.secret}", "x-preheat-client": "mallory"}
    assert gateway.ask("m", headers).status == 200
    assert gateway.get("/v1/models", headers).status == 200
    assert "authorization" not in engine.received[0].headers
    assert key.secret not in str(engine.received[0])
    (record,) = gateway.records_where(lambda record: record.model == "m")
    assert record.client == key.owner


@pytest.mark.parametrize("path", ["/live", "/ready", "/health"])
def test_health_is_answered_without_a_key(gateway: Gateway, engine: Upstream, path: str) -> None:
    with_keys(gateway, engine)
    assert gateway.get(path).status == 200


def test_nobody_but_the_owner_can_read_the_keys_in_envoys_files_and_admin(
    gateway: Gateway, engine: Upstream
) -> None:
    with_keys(gateway, engine)
    holders = [gateway.paths.xds / "lds.json", gateway.paths.envoy_admin_socket]
    for path in holders:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "sk-alice" in holders[0].read_text()
    assert stat.S_IMODE(gateway.paths.probe_socket.stat().st_mode) == 0o600
    assert "sk-alice" not in gateway.envoy.log_tail()


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def trusting(gateway: Gateway, engine: Upstream, authority: trustme.CA) -> ssl.SSLContext:
    """A gateway with TLS and a client's context that trusts it."""
    certificate = authority.issue_cert("localhost")
    listener = gateway.on_a_port_of_its_own(
        certificate_pem="".join(blob.bytes().decode() for blob in certificate.cert_chain_pems),
        key_pem=certificate.private_key_pem.bytes().decode(),
        keys=KEYS,
    )
    gateway.publish(model("m", engine), listener=listener)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def test_requests_pass_over_tls(
    gateway: Gateway, engine: Upstream, trusting: ssl.SSLContext
) -> None:
    body, headers = b'{"model":"m"}', {"authorization": "Bearer sk-bob"}
    reply = gateway.request("POST", "/v1/completions", body, headers, context=trusting)
    assert (reply.status, engine.received[0].body) == (200, body)


def test_a_client_that_does_not_trust_the_authority_is_not_served(
    gateway: Gateway, trusting: ssl.SSLContext
) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        gateway.request("GET", "/live", context=ssl.create_default_context())


@pytest.mark.parametrize(
    ("offered", "chosen"), [(["h2", "http/1.1"], "h2"), (["http/1.1"], "http/1.1")]
)
def test_http_2_is_offered(
    gateway: Gateway, trusting: ssl.SSLContext, offered: list[str], chosen: str
) -> None:
    trusting.set_alpn_protocols(offered)
    with (
        socket.create_connection(("127.0.0.1", gateway.port), LIMIT_S) as plain,
        trusting.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        assert secure.selected_alpn_protocol() == chosen
        assert secure.version() in ("TLSv1.2", "TLSv1.3")


@pytest.mark.usefixtures("trusting")
def test_plain_text_is_refused_where_tls_is_on(gateway: Gateway) -> None:
    with pytest.raises((http.client.HTTPException, OSError)):
        gateway.get("/live")
