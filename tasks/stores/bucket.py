"""A store in a bucket: S3, Google Cloud Storage, or Azure.

Credentials come from the places where the cloud's own tools find them. The text of obstore's errors is never passed on
verbatim: it contains the answer of the server, which for a bad signature contains the access key. This is the only
module that imports obstore.

obstore's threads do not survive a fork, and obstore cannot restart them. A process that has used a bucket therefore
starts other processes that need one as new Python processes (`has_threads`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from configparser import ConfigParser
from configparser import Error as ConfigError
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from packcorpus.tasks.core.errors import Bug, DataError, InputMissing, PackError, PartMissing, StorageError
from packcorpus.tasks.core.printable import shown
from packcorpus.tasks.stores.store import CHUNK, Facts, Progress, changed, cut_off, interruptible, receive
from packcorpus.tasks.stores.urls import split_url

RETRIES = 8  # of a request, in about 20 seconds including pauses

# By default, obstore ends a request after 30 s, including the transfer of the whole body.
TIMEOUTS = {"connect_timeout": timedelta(seconds=10), "read_timeout": timedelta(seconds=60), "timeout": timedelta(1)}
UPLOAD_PART = 8 << 20
UPLOADS = 4  # parts of an object that are sent at the same time
MOST_PARTS = 9_000  # of an object; the limit of S3 is 10,000
_NO_CREDENTIALS = re.compile(r"169\.254\.|metadata\.google|[Nn]o credentials|CredentialsNotLoaded|MissingCredential")

# obstore's report of an object that was not deleted. It deletes in batches, which S3 and Azure answer with 200 or 202.
_NOT_DELETED = re.compile(r"request failed for key .* \(code: (\w{1,60})\)")
_STATUS_OF_CODE = {"AccessDenied": "403", "SlowDown": "503"}  # codes of S3; Azure reports the status

# obstore's report of a key that it can neither read nor list. It lists no object next to it either.
_BAD_KEY = re.compile(r'[Pp]ath "(.*?)"(?: contained empty path segment|: Encountered illegal character)', re.DOTALL)

# Causes of errors without an HTTP status, by patterns in their text; the first match counts.
_CAUSES = {
    "configured region": "the bucket is in another region; set AWS_REGION",
    "timed out|TimedOut": "no answer in time",
    "dns error|lookup address": "the name of the server is unknown",
    "error sending request|connect": "the server cannot be reached",
}

_VARIABLES = {"s3": "AWS_…", "gs": "GOOGLE_…", "az": "AZURE_…"}

# The process in which obstore has started threads. A child that is forked later would wait for them forever.
_process = 0


class Bucket:
    """The objects below `url`, the folder `prefix` of the whole bucket `store`."""

    def __init__(self, url: str, store: Any, prefix: str = ""):
        self.url, self._store, self._prefix = url.rstrip("/"), store, prefix.strip("/")

    def url_of(self, key: str) -> str:
        return f"{self.url}/{key}".rstrip("/")

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}".strip("/")

    def head(self, key: str) -> Facts | None:
        with suppress(InputMissing), self._errors(key) as obstore:
            return _facts(interruptible(obstore.head, self._store, self._key(key)))
        return None

    def get(self, key: str) -> bytes:
        with self._errors(key) as obstore:
            return bytes(interruptible(lambda: obstore.get(self._store, self._key(key)).bytes()))

    def fetch(self, key: str, target: Path, expected: Facts, progress: Progress | None = None) -> str:
        return receive(self._body(key, expected), target, expected, self.url_of(key), progress)

    def read(self, key: str, expected: Facts, start: int, length: int) -> bytes:
        """Return bytes of an object. Raises object_changed if it is not as `expected`."""
        body = b"".join(self._body(key, expected, (start, start + length)))
        if len(body) != length:
            raise cut_off(self.url_of(key), start + len(body), start + length)
        return body

    def _body(self, key: str, expected: Facts, span: tuple[int, int] | None = None) -> Iterator[Any]:
        """Request an object, or its bytes [start, stop), and return its chunks."""
        url, options = self.url_of(key), {"if_match": expected.identity} | ({"range": span} if span else {})
        received, stop = span or (0, expected.size)
        with self._errors(key) as obstore:
            answer = interruptible(obstore.get, self._store, self._key(key), options=options)
            if _facts(answer.meta) != expected:  # not every server respects If-Match
                raise changed(url)
            stream = answer.stream(min_chunk_size=CHUNK)

        def chunks() -> Iterator[Any]:
            nonlocal received
            try:
                with self._errors(key):
                    while (chunk := interruptible(next, stream, None)) is not None:
                        received += len(chunk)
                        yield chunk
            except StorageError as error:
                if error.reason == "store_failed":  # no answer of the server, so the body was cut off
                    raise cut_off(url, received, stop) from None
                raise

        return chunks()

    def put(self, key: str, source: Path | bytes, absent: bool = False) -> bool:
        """Write an object from a finished file, completely or not at all.

        With `absent`, return False and write nothing if the object exists, also if another writer is just faster. The
        content is then held in memory, so `absent` is for receipts and manifests. False after an error of the server
        may mean that the first attempt has written the object: compare the content.
        """
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        part = max(UPLOAD_PART, -(-size // MOST_PARTS))
        sent = {"mode": "create", "use_multipart": False} if absent else {"mode": "overwrite", "chunk_size": part}
        with self._errors(key) as obstore:
            try:
                interruptible(obstore.put, self._store, self._key(key), source, max_concurrency=UPLOADS, **sent)
            except (FileExistsError, obstore.exceptions.AlreadyExistsError):
                return False
        return True

    def list(self, prefix: str = "") -> Iterator[tuple[str, Facts]]:
        listed: list[tuple[str, Facts]] = []
        with self._errors(prefix) as obstore:
            below = len(self._prefix) + bool(self._prefix)
            pages = interruptible(lambda: list(obstore.list(self._store, self._key(prefix) or None, chunk_size=1000)))
            for item in (item for page in pages for item in page):
                e_tag = item["e_tag"] or ""
                if self.url.startswith("az:") and e_tag and not e_tag.endswith('"'):
                    item = {**item, "e_tag": f'"{e_tag}"'}  # Azure leaves out the quotes only in lists
                listed.append((item["path"][below:], _facts(item)))
        yield from sorted(listed, key=lambda item: item[0].encode())

    def delete(self, key: str) -> None:
        """Delete an object, if it exists."""
        with suppress(InputMissing), self._errors(key) as obstore:
            interruptible(obstore.delete, self._store, self._key(key))

    @contextmanager
    def _errors(self, key: str) -> Iterator[Any]:
        """Yield obstore, and convert its errors to PackErrors."""
        obstore = _obstore()
        try:
            yield obstore
        except (PackError, FileExistsError):
            raise
        except FileNotFoundError:
            raise InputMissing("object_missing", f"{self.url_of(key)}: does not exist") from None
        except obstore.exceptions.PreconditionError:
            raise changed(self.url_of(key)) from None
        except (obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise explained(self.url_of(key), str(error)) from None


def explained(url: str, text: str) -> PackError:
    """Return the error for a report, of which only status and code are repeated."""
    status = re.search(r"status code: (\d{3})", text) or _NOT_DELETED.search(text)
    code = re.search(r"<Code>(\w{1,60})</Code>", text)
    if _NO_CREDENTIALS.search(text):
        return StorageError("store_denied", f"{url}: no credentials were found")
    if bad := _BAD_KEY.search(text):
        advice = "because a part of its key is empty, . or ..; rename it, or name each other object by its whole URL"
        return DataError("bad_key", f"{url}: the object {shown(bad[1])} cannot be read, {advice}")
    number = _STATUS_OF_CODE.get(status[1], status[1]) if status else ""
    answer = f"HTTP {number}{f' {code[1]}' if code else ''}"
    if number == "404":
        return InputMissing("object_missing", f"{url}: does not exist ({answer})")
    if number == "416" or "StartTooLarge" in text:
        return StorageError("object_cut", f"{url}: ended before the range that was read; run again")
    if number in ("401", "403"):
        return StorageError("store_denied", f"{url}: access denied ({answer})")
    if number in ("429", "503"):
        return StorageError("store_busy", f"{url}: too many requests ({answer}); run again later")
    causes = [cause for pattern, cause in _CAUSES.items() if re.search(pattern, text)]
    problem = answer if number else [*causes, "the answer cannot be read"][0]
    return StorageError("store_failed", f"{url}: {problem}; check the endpoint and the network, then run again")


def open_bucket(url: str, retries: int = RETRIES) -> Bucket:
    """Open a bucket, or a folder in it. Raises UsageError or StorageError."""
    parts, obstore = split_url(url), _obstore()
    config = _aws_config(os.environ) if parts.scheme == "s3" else {}
    retry = {"max_retries": retries, "retry_timeout": timedelta(minutes=3)}
    client = {**TIMEOUTS, "allow_http": _is_plain(parts.scheme, config)}
    try:
        where = f"{parts.scheme}://{parts.bucket}"
        store = obstore.store.from_url(where, config=config or None, client_options=client, retry_config=retry)
    except (obstore.exceptions.BaseError, ValueError) as error:
        text = str(error).lower()
        if parts.scheme == "az" and "account must" in text:
            problem = "the storage account is unknown; set AZURE_STORAGE_ACCOUNT_NAME"
        else:  # no server was asked yet
            what = "an endpoint" if " url" in text else "a key, a key file, or an option"
            problem = f"{what} in the variables {_VARIABLES[parts.scheme]} is invalid; fix it"
        raise StorageError("store_denied", f"{url}: {problem}") from None
    return Bucket(url, store, parts.key)


def _is_plain(scheme: str, config: Mapping[str, str]) -> bool:
    """Return whether the endpoint may be http://, as for an emulator."""
    if scheme == "gs":  # the endpoint is in GOOGLE_BASE_URL, or in the file of a service account: only obstore reads it
        return True
    of_azure = (os.environ.get(name, "") for name in ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT") if scheme == "az")
    return any(endpoint.startswith("http://") for endpoint in (config.get("aws_endpoint", ""), *of_azure))


def _aws_config(environment: Mapping[str, str]) -> dict[str, str]:
    """Return keys, region, and endpoint of the profile in ~/.aws.

    Keys and a region that the environment sets are left out. An endpoint in the environment replaces the endpoint of
    the profile. obstore reads the environment and the metadata of the instance, but not these files.
    """
    home, profile = Path.home() / ".aws", environment.get("AWS_PROFILE", "default")
    files = {
        environment.get("AWS_CONFIG_FILE", str(home / "config")): f"profile {profile}",
        environment.get("AWS_SHARED_CREDENTIALS_FILE", str(home / "credentials")): profile,
    }
    parser, found = ConfigParser(interpolation=None), dict[str, str]()
    try:
        parser.read(map(os.path.expanduser, files), encoding="utf-8")
    except (ConfigError, OSError, UnicodeError):  # the text of the error contains a line of the file
        raise StorageError("store_denied", f"{' or '.join(files)}: cannot be read; fix the file") from None
    for section in (*files.values(), profile):
        found |= dict(parser[section]) if section in parser else {}
    names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
    config = {} if "AWS_ACCESS_KEY_ID" in environment else {name: found[name] for name in names if name in found}
    if "region" in found and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & set(environment):
        config["aws_region"] = found["region"]
    endpoints = [environment.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")]
    if endpoint := next(filter(None, [*endpoints, found.get("endpoint_url")]), None):
        config["aws_endpoint"] = endpoint
    return config


open_store = lru_cache(maxsize=16)(open_bucket)  # once per process


def has_threads() -> bool:
    """Return whether this process has used a bucket: its forks cannot use one."""
    return bool(_process)


def _obstore() -> Any:
    """Import obstore. Raises PartMissing if it is missing, or Bug after a fork."""
    global _process
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        problem = "buckets require obstore, which is not installed; run: pip install obstore"
        raise PartMissing("library_missing", problem) from None
    _process = _process or os.getpid()
    if _process != os.getpid():
        raise Bug("bug", "a store was used before the process was forked; open it separately in each process")
    return obstore


def _facts(meta: Any) -> Facts:
    return Facts(meta["size"], meta["e_tag"] or meta["version"] or meta["last_modified"].isoformat())
