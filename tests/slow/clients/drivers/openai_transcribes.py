"""OpenAI's Python client: transcriptions, whole and streamed."""

import sys

from openai import OpenAI


def main(url: str, question: str) -> None:
    client = OpenAI(base_url=url, api_key="none")
    with open(question, "rb") as file:
        told = client.audio.transcriptions.create(model="default", file=file)
    assert isinstance(told.text, str)
    print("ok: transcription")
    with open(question, "rb") as file:
        events = client.audio.transcriptions.create(model="default", file=file, stream=True)
        kinds = [e.type for e in events]
    assert kinds[-1] == "transcript.text.done", kinds
    print("ok: transcription, streamed")


if __name__ == "__main__":
    main(*sys.argv[1:3])
