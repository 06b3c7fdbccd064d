"""Which addresses are found in messages, and what becomes of the parts that have them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stretto.errors import Invalid
from stretto.preprocess.pool.split import do_outline
from stretto.preprocess.remote_media import (
    MAX_REMOTE,
    MAX_URL,
    RemoteMedia,
    kind_of,
    remote_urls,
    with_content,
)
from stretto.preprocess.response_items import Translation
from tests.preprocess.samples import image_file, picture, sound_file, tone, video_file

URL = "https://cdn.example/a.png?x=1&y=ü"


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": URL}}, "image"),
        ({"type": "image_url", "image_url": {"detail": "low", "url": URL}}, "image"),
        ({"type": "image_url", "image_url": URL}, "image"),
        ({"type": "audio_url", "audio_url": {"url": URL}}, "audio"),
        ({"type": "video_url", "video_url": {"url": URL}}, "video"),
        ({"type": "input_audio", "input_audio": {"data": URL, "format": "wav"}}, "audio"),
    ],
)
def test_an_address_is_found_and_replaced(part: Any, kind: str) -> None:
    messages = user({"type": "text", "text": "Look."}, part)
    for written in (json.dumps(messages), json.dumps(messages).replace("/", "\\/")):
        assert remote_urls(written.encode()) == (URL,)
    content = memoryview(b"content")
    [message] = with_content(messages, RemoteMedia({URL: content}))
    assert message["content"] == [messages[0]["content"][0], {"type": kind, "data": content}]


def test_what_looks_like_an_address_in_a_text_is_none() -> None:
    text = 'see {"url": "https://cdn.example/a"} and "image_url":"https://b"'
    data = json.dumps(user({"type": "text", "text": text})).encode()
    assert remote_urls(data) == ()
    assert with_content(json.loads(data), RemoteMedia()) == json.loads(data)


def test_only_so_many_and_only_so_long() -> None:
    def data(*urls: str) -> bytes:
        return json.dumps([{"url": url} for url in urls]).encode()

    many = [f"http://{i}.example" for i in range(MAX_REMOTE + 3)]
    assert remote_urls(data(*many)) == tuple(many[:MAX_REMOTE])
    assert remote_urls(data(many[0], many[0])) == (many[0],)
    assert remote_urls(data("https:" + (MAX_URL + 1) * "x", many[0])) == (many[0],)
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in many]
    fetched = RemoteMedia({url: memoryview(b"") for url in many[:MAX_REMOTE]})
    with pytest.raises(Invalid, match="at most 8 remote files"):
        with_content(user(*parts), fetched)


def test_of_all_long_fields_together_only_so_many() -> None:
    urls = [f"http://{i}.example" for i in range(2 * MAX_REMOTE)]
    parts = [[{"url": url} for url in some] for some in (urls[:MAX_REMOTE], urls[MAX_REMOTE:])]
    body = json.dumps({"messages": parts[0], "tools": parts[1]}).encode()
    outlined, file = do_outline(memoryview(body), ("messages", "tools"), 1 << 20)
    file.close()
    assert outlined.remote == tuple(urls[:MAX_REMOTE])


@pytest.mark.parametrize(
    ("remote", "says"),
    [
        (RemoteMedia(), "--allowed-media-domains"),
        (RemoteMedia({}, {URL: "its server answered 404"}), "its server answered 404"),
    ],
)
def test_what_was_not_fetched_is_refused_with_its_place(remote: RemoteMedia, says: str) -> None:
    messages = user({"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": URL}})
    with pytest.raises(Invalid, match=says) as e:
        with_content(messages, remote)
    assert e.value.param == "messages[0].content[1].image_url.url"


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "input_image", "image_url": URL}, "image"),
        ({"type": "input_file", "file_url": URL, "filename": "x.bin"}, "audio"),
        ({"type": "input_file", "file_data": URL}, "audio"),
    ],
)
def test_items_of_responses(part: Any, kind: str) -> None:
    items = [{"type": "message", "role": "user", "content": [part]}]
    assert remote_urls(json.dumps(items).encode()) == (URL,)
    messages = Translation.of(items, None, {}).messages
    content = memoryview(sound_file(tone(0.1)))
    [message] = with_content(messages, RemoteMedia({URL: content}))
    assert message["content"] == [{"type": kind, "data": content}]


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (image_file(picture(8, 8)), "image"),
        (image_file(picture(8, 8), "JPEG"), "image"),
        (image_file(picture(8, 8), "WEBP"), "image"),
        (image_file(picture(8, 8), "GIF"), "image"),
        (sound_file(tone(0.1)), "audio"),
        (sound_file(tone(0.1), format="FLAC"), "audio"),
        (sound_file(tone(0.1), format="OGG"), "audio"),
        (sound_file(tone(0.1), format="MP3"), "audio"),
        (video_file(4, 4, (32, 32)), "video"),
        (b"", "video"),
    ],
)
def test_the_first_bytes_say_what_a_file_is(data: bytes, kind: str) -> None:
    assert kind_of(data[:12]) == kind


@pytest.mark.parametrize("messages", [None, 5, [5], [{"content": 5}], [{"content": [5, {}]}]])
def test_what_are_no_messages_is_left_to_their_reader(messages: Any) -> None:
    assert with_content(messages, RemoteMedia()) == messages
