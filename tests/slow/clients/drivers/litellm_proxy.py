"""The LiteLLM proxy in front of the server, asked by OpenAI's client."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from openai import OpenAI

CONFIG = """
model_list:
  - model_name: voice
    litellm_params: {{model: openai/default, api_base: "{url}", api_key: none}}
"""
START_S = 180
KEY = f"sk-{secrets.token_hex(16)}"


def main(url: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG.format(url=url))
        litellm = Path(sys.executable).parent / "litellm"
        command = [litellm, "--config", config, "--host", "127.0.0.1", "--port", str(port)]
        variables = {**os.environ, "LITELLM_MASTER_KEY": KEY}
        proxy = subprocess.Popen(command, env=variables, stdout=sys.stderr)
        try:
            wait(f"http://127.0.0.1:{port}/health/liveliness", proxy)
            ask(OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY))
        finally:
            proxy.send_signal(signal.SIGTERM)
            proxy.wait()


def wait(url: str, proxy: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(url):
                return
        except OSError:
            if time.monotonic() > until or proxy.poll() is not None:
                raise
            time.sleep(0.5)


def ask(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "What is seven plus eight?"}]
    assert client.chat.completions.create(model="voice", messages=messages).choices
    print("ok: chat")
    stream = client.chat.completions.create(model="voice", messages=messages, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    print("ok: chat, streamed")
    assert client.responses.create(model="voice", input="Hello").output_text
    print("ok: responses")
    spoken = client.audio.speech.create(
        model="voice", voice="alloy", input="Hello there.", response_format="pcm"
    )
    assert len(spoken.content) > 4800
    print("ok: speech")


if __name__ == "__main__":
    main(sys.argv[1])
