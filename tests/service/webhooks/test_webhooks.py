"""Webhooks as they are sent: signed, to where they may go, and not for ever."""

import asyncio
import datetime as dt
import ipaddress
import socket
import ssl
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.service.api.problems import ApiError
from semel.service.webhooks import egress, subscriptions
from semel.service.webhooks import sender as webhooks_sender
from semel.service.webhooks.deliveries import SendResult
from semel.service.webhooks.egress import addresses_of, is_public, target_of
from semel.service.webhooks.sender import WebhookSender, signature
from semel.service.webhooks.subscriptions import Subscription, new_secret, written
from support.webhooks import Receiver, receiving

SECRET = new_secret()


def subscribed(url: str) -> Subscription:
    return Subscription(
        id="s",
        tenant="",
        kind="webhook",
        target=url,
        secret=SECRET,
        events="*",
        created_us=0,
        disabled_us=None,
    )


def send(url: str, *, private: bool = True, body: str = '{"a":1}', times: int = 1) -> list[SendResult]:
    async def sending() -> list[SendResult]:
        async with WebhookSender(subscribed(url), private=private) as sender:
            return [await sender.send("run/1", body) for _ in range(times)]

    return asyncio.run(sending())


# -- what is sent ----------------------------------------------------------------------------------------------------


def test_an_event_is_posted_as_json_with_a_signature_that_the_receiver_can_check() -> None:
    with receiving() as receiver:
        answers = send(receiver.url, body='{"text":"größer"}')
    (received,) = receiver.received
    assert answers == [SendResult(204, None)]
    assert received.is_signed_with(SECRET)
    assert not received.is_signed_with(new_secret())
    assert received.body == '{"text":"größer"}'.encode()
    assert received.headers["content-type"] == "application/json"
    assert received.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert abs(int(received.headers["webhook-timestamp"]) - time.time()) < 60


def test_the_signature_is_that_of_the_specification() -> None:
    """The example in the text of Standard Webhooks."""
    said = signature(
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        1614265330,
        b'{"test": 2432232314}',
    )
    assert said == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_the_id_is_the_same_at_every_try_and_a_connection_serves_several() -> None:
    ports = []

    def note(handler: BaseHTTPRequestHandler) -> None:
        ports.append(handler.client_address[1])
        handler.send_response(500)
        handler.send_header("content-length", "0")
        handler.end_headers()

    with receiving(note) as receiver:
        answers = send(receiver.url, times=3)
    assert [each.status for each in answers] == [500] * 3
    assert set(receiver.ids) == {"run/1"}
    assert len(set(ports)) == 1


@pytest.mark.parametrize(
    ("status", "good"), [(200, True), (202, True), (299, True), (300, False), (404, False), (410, False), (503, False)]
)
def test_only_an_answer_of_the_two_hundreds_is_success(status: int, good: bool) -> None:
    with receiving(status) as receiver:
        (answered,) = send(receiver.url)
    assert (answered.good, answered.status) == (good, status)
    assert answered.error == (None if good else f"answered {status}")


def test_a_redirect_is_not_followed() -> None:
    with receiving() as other:

        def redirect(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(307)
            handler.send_header("location", other.url)
            handler.send_header("content-length", "0")
            handler.end_headers()

        with receiving(redirect) as receiver:
            (answered,) = send(receiver.url)
    assert (answered.good, answered.status, other.received) == (False, 307, [])


def test_a_receiver_that_hangs_is_waited_for_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks_sender, "TIMEOUT", 0.3)
    with receiving("hang") as receiver:
        (answered,) = send(receiver.url)
    assert answered == SendResult(None, "no answer within 0.3 seconds")


def test_of_a_receiver_that_drips_its_answer_the_status_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks_sender, "DRAIN_TIMEOUT", 0.2)

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("content-length", "100000")
        handler.end_headers()
        while True:
            handler.wfile.write(b"x")
            time.sleep(0.05)  # slowly, that is the point; the client hangs up

    with receiving(drip) as receiver:
        (answered,) = send(receiver.url)
    assert answered == SendResult(200, None)


def test_an_answer_that_breaks_off_has_said_its_status() -> None:
    def cut(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(202)
        handler.send_header("content-length", "1000")
        handler.end_headers()
        handler.wfile.write(b"x")
        handler.close_connection = True

    with receiving(cut) as receiver:
        (answered,) = send(receiver.url)
    assert answered == SendResult(202, None)


def test_a_receiver_that_hangs_up_is_an_answer_without_status() -> None:
    with receiving("close") as receiver:
        (answered,) = send(receiver.url)
    assert (answered.good, answered.status) == (False, None)
    assert answered.error is not None
    assert answered.error.startswith("RemoteProtocolError")


def test_nobody_at_the_other_end_is_an_answer_without_status() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (answered,) = send(f"http://127.0.0.1:{port}/secret-path?token=secret")
    assert (answered.good, answered.status) == (False, None)
    assert "secret" not in str(answered.error)


def test_of_an_endless_answer_only_the_beginning_is_read() -> None:
    with receiving("endless") as receiver:
        (answered,) = send(receiver.url)
    assert answered == SendResult(200, None)


def test_what_is_no_http_is_an_answer_without_status() -> None:
    def babble(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"\x00\xff no http\r\n\r\n")
        handler.close_connection = True

    with receiving(babble) as receiver:
        (answered,) = send(receiver.url)
    assert (answered.good, answered.status) == (False, None)


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would connect to whatever the name means there."""
    with receiving() as receiver, receiving(502) as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        (answered,) = send(receiver.url)
    assert (answered.good, proxy.received) == (True, [])


# -- where it may go -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "10.1.2.3",
        "100.64.0.1",
        "100.100.100.200",
        "127.0.0.1",
        "127.255.255.254",
        "168.63.129.16",
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.192",
        "192.168.1.1",
        "198.18.0.1",
        "224.0.0.1",
        "239.255.255.255",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::7f00:1",
        "::ffff:127.0.0.1",
        "::ffff:8.8.8.8",
        "64:ff9b::7f00:1",
        "64:ff9b:1::1",
        "100::1",
        "2001::1",
        "2001:db8::1",
        "2002:7f00:1::1",
        "3fff::1",
        "5f00::1",
        "fc00::1",
        "fd00:ec2::254",
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "ff02::1",
    ],
)
def test_an_address_of_the_inside_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "172.32.0.1", "172.15.255.255", "192.169.0.1", "2606:4700::1", "2a00:1450::1"]
)
def test_an_address_of_the_outside_is_public(address: str) -> None:
    assert is_public(address)


@given(st.ip_addresses())
def test_what_python_knows_to_be_no_global_address_is_not_public(ip: Any) -> None:
    assert ip.is_global or not is_public(str(ip))


@given(st.ip_addresses(v=4), st.sampled_from(["::ffff:0:0", "::", "64:ff9b::"]))
def test_an_ipv4_address_in_the_clothes_of_ipv6_is_not_public(ip: Any, prefix: str) -> None:
    assert not is_public(str(ipaddress.IPv6Address(int(ipaddress.IPv6Address(prefix)) | int(ip))))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "begins with http"),
        ("example.com/hook", "begins with http"),
        ("ftp://example.com/", "begins with http"),
        ("file:///etc/passwd", "begins with http"),
        ("gopher://example.com/", "begins with http"),
        ("http:///path", "begins with http"),
        ("http://user:pw@example.com/", "a user name or a password"),
        ("https://user@example.com/", "a user name or a password"),
        ("http://example.com:0/", "port 0"),
        ("http://example.com:99999/", "not a URL"),
        ("http://exa mple.com/", "not a URL"),
        ("http://example.com/\x00", "not a URL"),
        ("http://[::1/", "not a URL"),
        ("http://example.com/" + "x" * 2000, "characters"),
    ],
)
def test_a_url_that_no_webhook_goes_to_is_refused(url: str, why: str) -> None:
    with pytest.raises(ApiError, match=why) as refused:
        target_of(url)
    assert refused.value.status == 422


@given(st.text(max_size=300))
def test_any_text_as_a_url_is_taken_or_refused(url: str) -> None:
    try:
        scheme = target_of(url).scheme
    except ApiError:
        scheme = "http"
    assert scheme in ("http", "https")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "0",
        "localhost",
        "LOCALHOST.",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "①②⑦.0.0.1",
    ],
)
def test_this_machine_is_refused_however_it_is_spelt(host: str) -> None:
    with receiving() as receiver:
        (answered,) = send(f"http://{host}:{receiver.port}/hook", private=False)
    assert answered.error is not None
    assert answered.error.startswith("refused: ")
    assert receiver.received == []


def names(monkeypatch: pytest.MonkeyPatch, **told: list[str]) -> list[str]:
    """Let the resolver know some names, each with its addresses in turn; answers the list of those it was asked for."""
    asked: list[str] = []
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if not isinstance(name, str) or not name.endswith(".test"):
            return real(host, port, *args, **kwargs)
        asked.append(name)
        turns = told[name.partition(".")[0]]
        said = turns.pop(0) if len(turns) > 1 else turns[0]
        return [found for each in said.split() for found in real(each, port, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


def test_a_name_that_changes_its_address_after_the_check_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked up once a try: the address that was judged is the one that is connected to."""
    with receiving() as receiver:
        asked = names(monkeypatch, moving=["127.0.0.1", "127.0.0.2"])
        seen: list[str] = []
        monkeypatch.setattr(egress, "is_public", lambda address: seen.append(address) is None)
        (answered,) = send(f"http://moving.test:{receiver.port}/hook", private=False)
    assert (answered.good, asked, seen) == (True, ["moving.test"], ["127.0.0.1"])
    assert receiver.received[0].headers["host"] == f"moving.test:{receiver.port}"


def test_a_name_that_was_public_is_judged_anew_at_every_try(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, moving=["8.8.8.8", "127.0.0.1"])
    with receiving() as receiver:
        target = target_of(f"http://moving.test:{receiver.port}/hook")
        assert asyncio.run(addresses_of(target, private=False)) == ["8.8.8.8"]
        (answered,) = send(str(target), private=False)
    assert answered.error is not None
    assert "private address" in answered.error
    assert receiver.received == []


def test_one_private_address_among_several_is_enough_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, mixed=["8.8.8.8 10.0.0.1"])
    with pytest.raises(ApiError, match="private address"):
        asyncio.run(addresses_of(target_of("https://mixed.test/"), private=False))


def test_of_several_addresses_the_next_is_tried_when_one_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        names(monkeypatch, two=["127.0.0.2 127.0.0.1"])
        (answered,) = send(f"http://two.test:{receiver.port}/hook")
    assert answered.good
    assert len(receiver.received) == 1


def test_a_name_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ApiError, match="cannot be resolved") as refused:
        asyncio.run(addresses_of(target_of("https://nowhere.test/"), private=True))
    assert refused.value.status == 422


# -- over TLS --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of receiver.test and its key, signed by itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "receiver.test")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("receiver.test")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM) + private)
    return path


@pytest.fixture
def trusting(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """Who is trusted: the certificate. Answers the context of a server that has it."""
    monkeypatch.setattr(webhooks_sender, "_trust", lambda: ssl.create_default_context(cafile=str(certificate)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def tls_url(receiver: Receiver, host: str) -> str:
    return f"https://{host}:{receiver.port}/hook"


def test_over_tls_the_name_is_asked_for_and_checked_though_the_address_is_connected_to(
    trusting: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for: list[str | None] = []
    trusting.sni_callback = lambda _socket, name, _context: asked_for.append(name)
    names(monkeypatch, receiver=["127.0.0.1"])
    with receiving(context=trusting) as receiver:
        (answered,) = send(tls_url(receiver, "receiver.test"))
    assert (answered.error, asked_for) == (None, ["receiver.test"])
    assert receiver.received[0].headers["host"] == f"receiver.test:{receiver.port}"


@pytest.mark.parametrize("host", ["other.test", "127.0.0.1"])
def test_over_tls_a_certificate_of_another_name_is_no_receiver(
    host: str, trusting: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    names(monkeypatch, other=["127.0.0.1"])
    with receiving(context=trusting) as receiver:
        (answered,) = send(tls_url(receiver, host))
    assert answered.error is not None
    assert "certificate" in answered.error.lower()
    assert receiver.received == []


def test_a_certificate_that_nobody_vouches_for_is_no_receiver(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    names(monkeypatch, receiver=["127.0.0.1"])
    with receiving(context=context) as receiver:
        (answered,) = send(tls_url(receiver, "receiver.test"))
    assert answered.error is not None
    assert "CERTIFICATE_VERIFY_FAILED" in answered.error
    assert receiver.received == []


# -- what is wanted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["*"], "*"),
        (["RunCompleted"], "RunCompleted"),
        (["RunCompleted", "RunCreated", "RunCompleted"], "RunCreated RunCompleted"),
        (["RunCompleted", "*"], "*"),
        (list(subscriptions.EVENT_NAMES), "*"),
    ],
)
def test_events_are_kept_in_one_spelling(names: list[str], kept: str) -> None:
    assert written(names) == kept


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "127.0.0.1"), ("[::1]", "::1")])
def test_an_address_needs_no_resolver(host: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "RESOLVE_TIMEOUT", 0.0)
    assert asyncio.run(addresses_of(target_of(f"http://{host}/"), private=True)) == [address]
