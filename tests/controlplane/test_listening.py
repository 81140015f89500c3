from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import trustme

from preheat.controlplane.listening import listener_from
from preheat.core.errors import Busy, SpecError
from preheat.core.spec.schema import ApiKey, Listen, Model, Source, Spec, Tls, Version


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def spec(**changes: Any) -> Spec:
    model = Model(name="m", versions=(Version(source=Source(uri="/m.gguf")),))
    changes.setdefault("listen", Listen(port=free_port()))
    return Spec(models=(model,), **changes)


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    return pair(tmp_path, "server")


def pair(directory: Path, name: str) -> Tls:
    issued = trustme.CA().issue_cert("localhost")
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    for blob in issued.cert_chain_pems:
        blob.write_to_path(certificate, append=True)
    issued.private_key_pem.write_to_path(key)
    return Tls(certificate=str(certificate), key=str(key))


@pytest.fixture
def key(tmp_path: Path) -> ApiKey:
    file = tmp_path / "key"
    file.write_text("  s3cret  \nsecond line\n")
    return ApiKey(name="alice", file=str(file))


def test_loopback_needs_neither_keys_nor_tls() -> None:
    assert listener_from(spec(), insecure=False).keys == ()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_beyond_loopback_both_are_needed(host: str, tls: Tls, key: ApiKey) -> None:
    beyond = Listen(host=host, port=free_port())
    with pytest.raises(SpecError, match=r"api_keys and listen\.tls are not set"):
        listener_from(spec(listen=beyond), insecure=False)
    with pytest.raises(SpecError, match=r"listen\.tls is not set"):
        listener_from(spec(listen=beyond, api_keys=(key,)), insecure=False)
    with_tls = Listen(host=host, port=beyond.port, tls=tls)
    with pytest.raises(SpecError, match="api_keys is not set") as caught:
        listener_from(spec(listen=with_tls), insecure=False)
    assert "--insecure-listen" in caught.value.advice


def test_both_or_the_flag_allow_it(tls: Tls, key: ApiKey) -> None:
    safe = Listen(host="0.0.0.0", port=free_port(), tls=tls)
    listener = listener_from(spec(listen=safe, api_keys=(key,)), insecure=False)
    assert "BEGIN CERTIFICATE" in listener.certificate_pem
    assert "PRIVATE KEY" in listener.key_pem
    open_to_all = Listen(host="0.0.0.0", port=free_port())
    assert listener_from(spec(listen=open_to_all), insecure=True).host == "0.0.0.0"


def test_a_key_is_the_first_line_of_its_file_or_a_variable(
    key: ApiKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOBS_KEY", "other")
    bob = ApiKey(name="bob", env="BOBS_KEY")
    listener = listener_from(spec(api_keys=(key, bob)), insecure=False)
    assert [(k.owner, k.secret) for k in listener.keys] == [("alice", "s3cret"), ("bob", "other")]
    assert "s3cret" not in repr(listener)


def test_a_key_that_is_empty_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOBODYS_KEY", raising=False)
    with pytest.raises(SpecError, match="NOBODYS_KEY"):
        listener_from(spec(api_keys=(ApiKey(name="a", env="NOBODYS_KEY"),)), insecure=False)
    (tmp_path / "empty").write_text("\nx\n")
    empty = ApiKey(name="a", file=str(tmp_path / "empty"))
    with pytest.raises(SpecError, match="holds nothing"):
        listener_from(spec(api_keys=(empty,)), insecure=False)


@pytest.mark.parametrize("secret", [b"two words", "schlüssel".encode(), b"a\tb"])
def test_a_key_that_no_header_can_carry_is_refused_unseen(tmp_path: Path, secret: bytes) -> None:
    (tmp_path / "key").write_bytes(secret)
    with pytest.raises(SpecError) as caught:
        listener_from(
            spec(api_keys=(ApiKey(name="a", file=str(tmp_path / "key")),)), insecure=False
        )
    assert secret.decode() not in str(caught.value)


def test_bytes_of_a_key_that_is_no_text_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"\xff\xfes3cret")
    with pytest.raises(SpecError) as caught:
        listener_from(
            spec(api_keys=(ApiKey(name="a", file=str(tmp_path / "key")),)), insecure=False
        )
    assert "no text" in str(caught.value)
    assert "0xff" not in str(caught.value)


def test_two_keys_with_one_secret_are_refused(key: ApiKey) -> None:
    same = ApiKey(name="bob", file=key.file)
    with pytest.raises(SpecError, match="'alice' and 'bob' hold the same secret"):
        listener_from(spec(api_keys=(key, same)), insecure=False)


def test_a_certificate_and_a_key_that_do_not_belong_together_are_refused(
    tmp_path: Path, tls: Tls
) -> None:
    other = pair(tmp_path, "other")
    mixed = Listen(port=free_port(), tls=Tls(certificate=tls.certificate, key=other.key))
    with pytest.raises(SpecError, match="cannot be used together"):
        listener_from(spec(listen=mixed), insecure=False)


def test_what_cannot_be_read_is_named(tls: Tls) -> None:
    gone = Listen(port=free_port(), tls=Tls(certificate=tls.certificate, key="/does/not/exist"))
    with pytest.raises(SpecError, match=r"listen\.tls\.key: /does/not/exist"):
        listener_from(spec(listen=gone), insecure=False)


def test_a_port_in_use_is_busy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(Busy, match="in use"):
            listener_from(spec(listen=Listen(port=taken.getsockname()[1])), insecure=False)


def test_an_address_that_is_not_this_machines_is_refused() -> None:
    with pytest.raises(SpecError, match=r"cannot listen on 192\.0\.2\.1"):
        listener_from(spec(listen=Listen(host="192.0.2.1", port=free_port())), insecure=True)
