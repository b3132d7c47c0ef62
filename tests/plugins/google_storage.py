"""A stand-in for Google Cloud Storage: the part of its XML API that the package uses. Objects are in memory.

    python google_storage.py PORT

No registry has a server that decides conditional PUTs of the XML API: fake-gcs-server accepts PUTs of signed URLs only,
and gcp-storage-emulator has no generations there. This one follows Google's documentation of the API. So it shows that
the requests are right, and not how Google's servers behave.

    PUT            x-goog-if-generation-match: the generation that the object has; 0: it must not exist. 412 otherwise
    GET, HEAD      Range; ETag and x-goog-generation in the answer
    DELETE         404 if there is no such object
    GET of bucket  list-type=2, prefix, delimiter, start-after, continuation-token
    POST           multipart uploads: ?uploads, ?uploadId; their parts are PUT with ?partNumber&uploadId
"""

from __future__ import annotations

import hashlib
import re
import sys
import threading
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 1000  # objects in a listing
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class Stored(NamedTuple):
    data: bytes
    generation: int
    modified: datetime

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data, usedforsecurity=False).hexdigest()}"'


class Bucket:
    """The objects of the bucket, whatever its name. Each request that changes one is decided under a lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.numbers = count(1_700_000_000_000_000)

    def put(self, key: str, data: bytes, generation: str | None) -> Stored | None:
        """Store an object. None: it does not have the generation."""
        with self.lock:
            before = self.objects.get(key)
            if generation is not None and int(generation) != (before.generation if before is not None else 0):
                return None
            self.objects[key] = Stored(data, next(self.numbers), datetime.now(UTC))
            return self.objects[key]

    def delete(self, key: str) -> bool:
        """Remove an object. False: there is none."""
        with self.lock:
            return self.objects.pop(key, None) is not None

    def listing(self, prefix: str, delimiter: str, after: str) -> str:
        """Return a page of a listing."""
        with self.lock:
            stored_objects = sorted(self.objects.items())
        entries, groups, last = list[str](), list[str](), ""
        for key, stored in stored_objects:
            if not key.startswith(prefix) or key <= after or (delimiter and key.startswith(tuple(groups))):
                continue
            if len(entries) + len(groups) == PAGE:
                break
            last = key
            head, cut, _ = key.removeprefix(prefix).partition(delimiter) if delimiter else (key, "", "")
            if cut:
                groups.append(f"{prefix}{head}{cut}")
                continue
            entries.append(
                f"<Contents><Key>{escape(key)}</Key><Generation>{stored.generation}</Generation>"
                f"<MetaGeneration>1</MetaGeneration><LastModified>{stored.modified:%Y-%m-%dT%H:%M:%S.%f}Z</LastModified>"
                f"<ETag>{escape(stored.etag)}</ETag><Size>{len(stored.data)}</Size></Contents>"
            )
        else:
            last = ""
        more = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if last else ""
        parts = "".join(f"<CommonPrefixes><Prefix>{escape(group)}</Prefix></CommonPrefixes>" for group in groups)
        truncated = str(bool(last)).lower()
        found_all = "".join(entries) + parts
        return f"<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{more}{found_all}</ListBucketResult>"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    bucket: Bucket

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _request(self) -> tuple[str, dict[str, str], bytes]:
        """Return the key, the parameters and the body. The key of the bucket itself is empty."""
        parts = urlsplit(self.path)
        _, _, key = parts.path.lstrip("/").partition("/")
        parameters = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        if len(body) != length:
            raise ConnectionResetError  # the client was killed in the middle: nothing is stored
        return unquote(key), parameters, body

    def _answer(self, status: int, data: bytes = b"", stored: Stored | None = None, **headers: str) -> None:
        self.send_response(status)
        if stored is not None:
            headers = {"ETag": stored.etag, "x-goog-generation": str(stored.generation), **headers}
            headers["Last-Modified"] = format_datetime(stored.modified, usegmt=True)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def do_GET(self) -> None:
        key, options, _ = self._request()
        if not key:
            after = options.get("continuation-token") or options.get("start-after", "")
            page = self.bucket.listing(options.get("prefix", ""), options.get("delimiter", ""), after)
            return self._answer(200, page.encode(), Content_Type="application/xml")
        stored = self.bucket.objects.get(key)
        if stored is None:
            return self._refuse(404, "NoSuchKey")
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        if asked is None:
            return self._answer(200, stored.data, stored, **self._length(stored))
        start, size = int(asked[1]), len(stored.data)
        end = min(int(asked[2]) if asked[2] else size - 1, size - 1)
        if start >= size:
            return self._refuse(416, "InvalidRange")
        return self._answer(206, stored.data[start : end + 1], stored, Content_Range=f"bytes {start}-{end}/{size}")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _length(self, stored: Stored) -> dict[str, str]:
        return {"Content-Length": str(len(stored.data))} if self.command == "HEAD" else {}

    def do_PUT(self) -> None:
        key, options, body = self._request()
        if "uploadId" in options:
            self.bucket.uploads[options["uploadId"]][int(options["partNumber"])] = body
            return self._answer(200, ETag=f'"{options["partNumber"]}"')
        stored = self.bucket.put(key, body, self.headers.get("x-goog-if-generation-match"))
        return self._refuse(412, "PreconditionFailed") if stored is None else self._answer(200, b"", stored)

    def do_POST(self) -> None:
        key, options, _ = self._request()
        if "uploads" in options:
            number = str(next(self.bucket.numbers))
            self.bucket.uploads[number] = {}
            document = f"<UploadId>{number}</UploadId>"
            page = f"<InitiateMultipartUploadResult>{document}</InitiateMultipartUploadResult>"
            return self._answer(200, page.encode())
        if "uploadId" not in options:
            return self._refuse(501, "NotImplemented")
        parts = self.bucket.uploads.pop(options["uploadId"])
        stored = self.bucket.put(key, b"".join(data for _, data in sorted(parts.items())), None)
        assert stored is not None
        page = f"<CompleteMultipartUploadResult><ETag>{escape(stored.etag)}</ETag></CompleteMultipartUploadResult>"
        return self._answer(200, page.encode(), stored)

    def do_DELETE(self) -> None:
        key, options, _ = self._request()
        if "uploadId" in options:
            del self.bucket.uploads[options["uploadId"]]
            return self._answer(204)
        return self._answer(204) if self.bucket.delete(key) else self._refuse(404, "NoSuchKey")


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Do not print errors of clients that were killed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


if __name__ == "__main__":
    Handler.bucket = Bucket()
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
