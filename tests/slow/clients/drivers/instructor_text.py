"""instructor: what a class describes, by a function's call and by a schema."""

import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Sum(BaseModel):
    """A sum."""

    answer: Literal["fifteen", "sixteen"]


def main(url: str) -> None:
    client = OpenAI(base_url=url, api_key="none")
    ask = [{"role": "user", "content": "What is seven plus eight?"}]
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        told = instructor.from_openai(client, mode=mode).chat.completions.create(
            model="default", messages=ask, response_model=Sum, max_retries=0
        )
        assert isinstance(told, Sum)
        print(f"ok: {mode.value}")


if __name__ == "__main__":
    main(sys.argv[1])
