"""A stand-in for the real server: three models that say who they are, over OpenAI's API."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


METRICS = """\
# HELP jaxlora_decode_steps_total Steps with decode rows
# TYPE jaxlora_decode_steps_total counter
jaxlora_decode_steps_total{adapters="2",base="true",engine="0",model_name="smollm2"} 41.0
jaxlora_decode_steps_total{adapters="1",base="true",engine="0",model_name="smollm2"} 6.0
jaxlora_decode_steps_created{adapters="2",base="true"} 1.7e+09
"""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._reply(METRICS if self.path == "/metrics" else "{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        assert body["temperature"] == 0
        if body["model"] not in ("smollm2", "pirate", "bullets"):
            self._reply("{}", 404)
            return
        text = f"{body['model']} on {body['messages'][0]['content']}"
        self._reply(json.dumps({"choices": [{"message": {"content": text}}]}))

    def _reply(self, text: str, status: int = 200) -> None:
        payload = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_args: object) -> None:
        pass


if __name__ == "__main__":

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
