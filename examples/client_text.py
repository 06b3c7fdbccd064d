"""A question and its answer, word by word, with OpenAI's own client. Needs a server (`stretto
serve`) and `pip install openai`:

python examples/client_text.py [URL [KEY]]"""

import sys

try:
    from openai import OpenAI, OpenAIError
except ImportError as error:
    sys.exit(f"{error}: pip install openai")

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
key = sys.argv[2] if len(sys.argv) > 2 else "none"

try:
    with OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        answer = client.chat.completions.create(
            model="default",
            messages=[
                {"role": "system", "content": "Answer briefly."},
                {"role": "user", "content": "What is a fugue?"},
            ],
            max_tokens=40,
            stream=True,
        )
        for chunk in answer:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()
except OpenAIError as error:
    sys.exit(f"{url}: {error} (is `stretto serve` running there, and is the key right?)")
