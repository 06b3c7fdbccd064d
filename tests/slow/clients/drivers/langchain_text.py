"""LangChain: an answer, a stream, structured output, functions, the Responses API."""

import sys
from typing import Any, Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Sum(BaseModel):
    """A sum."""

    answer: Literal["fifteen", "sixteen"]


@tool
def weather(city: Literal["Bonn", "Rome"]) -> str:
    """How the weather is in a city."""
    return f"It is sunny in {city}."


def main(url: str) -> None:
    given: dict[str, Any] = {"model": "default", "base_url": url, "api_key": "none"}
    model = ChatOpenAI(**given)
    question = "What is seven plus eight?"
    assert model.invoke(question).content
    print("ok: invoke")
    assert "".join(str(c.content) for c in model.stream(question))
    print("ok: stream")
    told = model.with_structured_output(Sum, method="json_schema").invoke(question)
    assert isinstance(told, Sum)
    print("ok: structured output")
    calls = model.bind_tools([weather], tool_choice="weather").invoke("Weather in Bonn?").tool_calls
    assert [c["name"] for c in calls] == ["weather"], calls
    print("ok: a function is called")
    assert ChatOpenAI(**given, use_responses_api=True).invoke(question).text
    print("ok: the Responses API")


if __name__ == "__main__":
    main(sys.argv[1])
