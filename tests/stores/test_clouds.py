"""Azure and Google Cloud Storage differ from S3 in answers and addresses.

The answers come from an emulator, Azurite. A whole store can be tested with any server: see `store` in test_stores.py.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers.remote import SECRET, Answers, failing_store, needs_remote, served

from packcorpus.tasks.core.errors import PackError
from packcorpus.tasks.core.messages import as_text
from packcorpus.tasks.stores.store import Facts

needs_remote()

from packcorpus.tasks.stores.bucket import explained, open_bucket  # noqa: E402

NAMES = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURE_STORAGE_USE_EMULATOR", "AZURE_STORAGE_SAS_KEY",
         "GOOGLE_BASE_URL", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_APPLICATION_CREDENTIALS", "HTTP_PROXY")  # fmt: skip

LISTED = (
    '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>'
    '<EnumerationResults ServiceEndpoint="http://127.0.0.1/account" '
    'ContainerName="container"><Prefix/><Marker/><MaxResults>5000</MaxResults><Blobs><Blob><Name>chats.jsonl</Name>'
    "<Properties><Creation-Time>Tue, 24 Nov 2026 19:04:06 GMT</Creation-Time>"
    "<Last-Modified>Tue, 24 Nov 2026 19:04:06 GMT</Last-Modified><Etag>0x1CCB08DBECE4440</Etag>"
    "<Content-Length>3</Content-Length><Content-Type>application/octet-stream</Content-Type>"
    "<BlobType>BlockBlob</BlobType></Properties></Blob></Blobs><NextMarker/></EnumerationResults>"
)


class _Azure(Answers):
    def do_GET(self) -> None:
        if "comp=list" in self.path:
            self.answer(200, LISTED.encode())
        elif self.headers.get("If-Match", '"0x1CCB08DBECE4440"') != '"0x1CCB08DBECE4440"':
            self.answer(412, b"<Error><Code>ConditionNotMet</Code></Error>")
        else:
            self.answer(200, b"xyz", ETag='"0x1CCB08DBECE4440"', Last_Modified="Tue, 24 Nov 2026 19:04:06 GMT")

    do_HEAD = do_GET


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the configuration of this machine by a test account."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(SECRET.encode()).decode())


@pytest.fixture
def azure() -> Iterator[str]:
    with served(_Azure) as server:
        yield f"http://127.0.0.1:{server.server_address[1]}/account"


@pytest.mark.parametrize("variable", ["AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"])
def test_an_object_that_azure_lists_is_the_one_that_it_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, azure: str, variable: str
) -> None:
    """ETags in a listing of Azure have no quotes.

    The endpoint is http://, as the endpoint of an emulator is.
    """
    monkeypatch.setenv(variable, azure)
    store = open_bucket("az://container", retries=0)
    facts = Facts(3, '"0x1CCB08DBECE4440"')
    assert list(store.list()) == [("chats.jsonl", facts)]
    assert store.head("chats.jsonl") == facts
    store.fetch("chats.jsonl", tmp_path / "fetched", facts)
    assert (tmp_path / "fetched").read_bytes() == b"xyz"


@pytest.mark.parametrize("by", ["variable", "file"])
def test_the_endpoint_of_google_may_be_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    with failing_store() as (address, _):
        if by == "variable":
            monkeypatch.setenv("GOOGLE_BASE_URL", address)
            monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
        else:
            keys = '"disable_oauth": true, "client_email": "", "private_key": "", "private_key_id": ""'
            (tmp_path / "keys.json").write_text(f'{{"gcs_base_url": "{address}", {keys}}}')
            monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "keys.json"))
        assert open_bucket("gs://bucket", retries=0).head("key") == Facts(1000, '"one"')


@pytest.mark.parametrize(
    ("url", "variable", "value", "words"),
    [
        ("az://container", "AZURE_STORAGE_ACCOUNT_KEY", f"no base64 {SECRET}", "a key, .* in the variables AZURE_…"),
        ("az://container", "AZURE_STORAGE_ENDPOINT", "127.0.0.1:10000", "an endpoint in the variables AZURE_…"),
        ("gs://bucket", "GOOGLE_SERVICE_ACCOUNT", "/no/such/file", "a key, a key file, .* in the variables GOOGLE_…"),
        ("gs://bucket", "GOOGLE_SERVICE_ACCOUNT_KEY", f'{{"{SECRET}"', "a key, .* in the variables GOOGLE_…"),
        ("s3://bucket", "AWS_CONDITIONAL_PUT", SECRET, "a key, .* or an option in the variables AWS_…"),
    ],
)
def test_a_setting_that_cannot_be_used_is_not_blamed_on_the_server(
    monkeypatch: pytest.MonkeyPatch, url: str, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(PackError, match=f"^{url}: {words} is invalid; fix it$") as caught:
        open_bucket(url)
    assert caught.value.reason == "store_denied"
    assert SECRET not in as_text(caught.value)


@pytest.mark.parametrize(
    ("text", "reason", "words"),
    [
        ("Bulk delete request failed for key k: This request is not authorized. (code: 403)", "denied", "HTTP 403"),
        ("DeleteObjects request failed for key k: Access Denied (code: AccessDenied)", "denied", "HTTP 403"),
        ("DeleteObjects request failed for key k: Reduce your rate. (code: SlowDown)", "busy", "HTTP 503"),
        ("DeleteObjects request failed for key k: Try again. (code: InternalError)", "failed", "HTTP InternalError"),
    ],
)
def test_a_deletion_that_is_refused_within_a_batch(text: str, reason: str, words: str) -> None:
    """obstore reports these texts if a batch succeeds without deleting the object."""
    error = explained("az://container/k", f"Generic error: {text}\n\nDebug source:\nGeneric {{}}")
    assert error.reason == f"store_{reason}"
    assert words in str(error)
