"""From the spec's ``listen``, ``api_keys`` and ``limits`` to the gateway's Listener.

Reads the secrets, refuses what would be unsafe or what Envoy would refuse, and finds out that a
port is taken before anything is started. What does not belong here: Envoy's own terms.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from pathlib import Path

from preheat.core.errors import Busy, SpecError
from preheat.core.spec.schema import ApiKey, Spec, Tls
from preheat.dataplane.envoy.routing import Key, Listener


def listener_from(spec: Spec, *, insecure: bool) -> Listener:
    """Raises SpecError for unreadable or unsafe settings, Busy for a port that is in use."""
    listen = spec.listen
    if not insecure:
        _require_safe(spec)
    certificate_pem, key_pem = _pair(listen.tls) if listen.tls else ("", "")
    listener = Listener(
        host=listen.host,
        port=listen.port,
        certificate_pem=certificate_pem,
        key_pem=key_pem,
        keys=_keys(spec.api_keys),
        max_body_bytes=spec.limits.max_body_bytes,
        max_connections=spec.limits.max_connections,
        max_requests_waiting=spec.limits.max_requests_waiting,
        retries=spec.limits.retries,
    )
    _require_free(listen.host, listen.port)
    return listener


def _require_safe(spec: Spec) -> None:
    host = spec.listen.host
    needed = {"api_keys": spec.api_keys, "listen.tls": spec.listen.tls}
    lacking = [name for name, given in needed.items() if not given]
    if ipaddress.ip_address(host).is_loopback or not lacking:
        return
    raise SpecError(
        f"listening on {host} reaches beyond this machine, and {' and '.join(lacking)} "
        f"{'is' if len(lacking) == 1 else 'are'} not set",
        advice="set api_keys and listen.tls, or say `preheat serve --insecure-listen` if something "
        "in front of preheat takes care of it",
    )


def _keys(keys: tuple[ApiKey, ...]) -> tuple[Key, ...]:
    owners: dict[str, str] = {}
    for key in keys:
        owner = owners.setdefault(_secret(key), key.name)
        if owner != key.name:
            raise SpecError(
                f"the API keys {owner!r} and {key.name!r} hold the same secret",
                advice="give each its own, or leave one out",
            )
    return tuple(Key(owner, secret) for secret, owner in owners.items())


def _secret(key: ApiKey) -> str:
    if key.env is not None:
        secret, where = os.environ.get(key.env, ""), f"the environment variable {key.env}"
    else:
        where = str(key.file)
        secret = _text(where, f"api_keys {key.name}").partition("\n")[0].strip()
    if not secret:
        raise SpecError(f"the API key {key.name!r} is empty: {where} holds nothing")
    if not (secret.isascii() and secret.isprintable()) or " " in secret:
        raise SpecError(
            f"the API key {key.name!r} in {where} cannot be sent in a header",
            advice="use letters, digits and signs of ASCII, without spaces",
        )
    return secret


def _pair(tls: Tls) -> tuple[str, str]:
    """The certificate chain and its private key, PEM."""
    import ssl  # 6 ms that only TLS pays

    certificate = _text(tls.certificate, "listen.tls.certificate")
    key = _text(tls.key, "listen.tls.key")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Without the function a key with a passphrase would ask for it on the terminal.
        context.load_cert_chain(tls.certificate, tls.key, password=lambda: "")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise SpecError(
            f"listen.tls: {tls.certificate} and {tls.key} cannot be used together: {reason}",
            advice="give a PEM certificate chain and its PEM private key, without a passphrase",
        ) from error
    return certificate, key


def _text(path: str, field: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise SpecError(f"{field}: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        # The error itself would show bytes of what may be a secret.
        raise SpecError(f"{field}: {path} cannot be read: it is no text") from None


def _require_free(host: str, port: int) -> None:
    """Envoy listens with SO_REUSEPORT and would share a port with another Envoy without a word."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise Busy(
                    f"port {port} on {host} is in use",
                    advice="stop who uses it, or give another: --port N",
                ) from error
            raise SpecError(
                f"cannot listen on {host}:{port}: {error.strerror}",
                advice="give an address of this machine, and a port that this user may use",
            ) from error
