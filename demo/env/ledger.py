"""A program with something to lose: a table in memory, a counter, and a directory of data.

GET /add?n=3 adds to the counter; every answer says who answers: the token is drawn once, when
the program starts, so two programs with the same token are copies of one.
"""

import json
import os
import pathlib
import secrets
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

DATA = pathlib.Path.home() / "ledger-data"
DATA.mkdir(exist_ok=True)
for part in range(20):
    (DATA / f"part-{part:02}.txt").write_text("\n".join(str(part * 1000 + row) for row in range(1000)))

table = {int(line): line for part in sorted(DATA.iterdir()) for line in part.read_text().split()}
state = {"token": secrets.token_hex(4), "pid": os.getpid(), "rows": len(table), "count": 0}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        state["count"] += int(parse_qs(urlsplit(self.path).query).get("n", ["0"])[0])
        body = json.dumps(state | {"files": len(list(DATA.glob("*")))}).encode() + b"\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


HTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
