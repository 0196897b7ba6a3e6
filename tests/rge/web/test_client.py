"""Clients of the web: the environment's proxies and certificates, and this machine's own addresses."""

import asyncio
import ssl
from pathlib import Path

import certifi
import httpx
import pytest
from faults import error_about

from data_prep.rmir.config import DownloadConfig
from data_prep.rmir.pictures.download import fetch
from rge.calls.caller import Caller
from rge.calls.local_server import Answer, LocalServer, chat
from rge.calls.model_config import ModelConfig
from rge.calls.request import Request
from rge.calls.store import AnswerStore
from rge.calls.wire.bodies import served_model
from rge.common.errors import UserError
from rge.index.sources import Entry, load
from rge.web.client import PROXIES, make_client

BROKEN = {
    "HTTPS_PROXY": "socks://me:secret-word@proxy:1080",
    "all_proxy": "socks5://me:secret-word@proxy:1080",
    "HTTP_PROXY": "http://me:secret-word@[::",
    "SSL_CERT_FILE": "/no/such/file.pem",
}
ADDRESS = "http://host.invalid/v1"


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """An environment without proxies and certificates of its own."""
    for name in PROXIES:
        for spelt in (name, name.upper()):
            monkeypatch.delenv(spelt, raising=False)
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


def by_caller(folder):
    config = ModelConfig(name="m", base_url=ADDRESS)
    Caller({"m": config}, AnswerStore(None)).run([Request("m", ("a",))])


def by_list(folder):
    served_model(ModelConfig(name="m", base_url=ADDRESS))


def by_download(folder):
    fetch([f"{ADDRESS}/a.png"], folder, DownloadConfig())


def by_index(folder):
    load(Entry("a", "1", image=f"{ADDRESS}/a.png"))


@pytest.mark.parametrize("work", [by_caller, by_list, by_download, by_index])
@pytest.mark.parametrize("name", BROKEN)
def test_a_variable_that_cannot_be_used_is_named(monkeypatch, tmp_path, name, work):
    """Calls of models, their list, downloads of a library, and one web picture of a table: each was a traceback."""
    if name.lower() == "all_proxy":
        monkeypatch.setitem(__import__("sys").modules, "socksio", None)
    monkeypatch.setenv(name, BROKEN[name])
    with error_about(UserError, name) as caught:
        work(tmp_path)
    assert "secret-word" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_proxy_is_not_asked_for_this_machine(monkeypatch, name):
    """The demo's server is on 127.0.0.1, which a company's proxy does not know."""

    async def proxy(path, body):
        return Answer("from the proxy", content_type="text/plain")

    async def server(path, body):
        return chat("from the server")

    with LocalServer(proxy) as between, LocalServer(server) as at:
        monkeypatch.setenv(name, f"http://127.0.0.1:{between.port}")
        with make_client(httpx.Client) as client:
            for host in ("127.0.0.1", "localhost"):
                answer = client.post(f"http://{host}:{at.port}/v1", json={})
                assert answer.json()["choices"]
            assert client.post("http://elsewhere.invalid/v1", json={}).text == "from the proxy"

        async def ask():
            async with make_client(httpx.AsyncClient) as client:
                return await client.post(at.url, json={})

        assert asyncio.run(ask()).json()["choices"]


def test_certificates_are_read_once_and_again_where_the_environment_names_others(monkeypatch, tmp_path):
    bundles = [tmp_path / "a.pem", tmp_path / "b.pem"]
    for bundle in bundles:
        bundle.write_bytes(Path(certifi.where()).read_bytes())
    read, original = [], ssl.create_default_context
    monkeypatch.setattr(
        ssl, "create_default_context", lambda **named: read.append(named["cafile"]) or original(**named)
    )
    for bundle in (bundles[0], bundles[0], bundles[1]):
        monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
        make_client(httpx.Client).close()
    assert read == [str(bundle) for bundle in bundles]
