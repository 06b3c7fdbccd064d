"""OpenAI's Python client: chat, responses, speech, a spoken question."""

import base64
import sys

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["fifteen", "sixteen"]}},
    "required": ["answer"],
}


def main(url: str, question: str) -> None:
    client = OpenAI(base_url=url, api_key="none")
    ask = [{"role": "user", "content": "What is seven plus eight?"}]
    told = client.chat.completions.create(model="default", messages=ask)
    assert told.choices[0].message.content
    print("ok: chat")
    stream = client.chat.completions.create(
        model="default",
        messages=ask,
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "pcm16"},
        stream=True,
    )
    sound = b""
    for chunk in stream:
        part = chunk.choices[0].delta.audio if chunk.choices else None
        sound += base64.b64decode((part.data if part else None) or "")
    assert len(sound) > 4800
    print("ok: chat, streamed, spoken")
    with open(question, "rb") as file:
        data = base64.b64encode(file.read()).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    told = client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": [part]}]
    )
    assert told.choices[0].message.content
    print("ok: chat, a spoken question")
    format = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
    told = client.chat.completions.create(model="default", messages=ask, response_format=format)
    assert (told.choices[0].message.content or "").startswith('{"answer"')
    print("ok: chat, structured")
    assert client.responses.create(model="default", input="What is seven plus eight?").output_text
    print("ok: responses")
    with client.responses.stream(model="default", input="Hello") as events:
        assert [e.type for e in events][-1] == "response.completed"
    print("ok: responses, streamed")
    with client.audio.speech.with_streaming_response.create(
        model="default", voice="alloy", input="Hello there.", response_format="pcm"
    ) as spoken:
        assert len(spoken.read()) > 4800
    print("ok: speech, streamed")


if __name__ == "__main__":
    main(*sys.argv[1:3])
