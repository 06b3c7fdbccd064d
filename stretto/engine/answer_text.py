"""The text of an answer as its tokens come: up to a stop string, never beyond one. Owned by
`RequestState`, on the event loop; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.preprocess.template import TextStream


class AnswerText:
    """Without stop strings, what `decoder` makes of the tokens. Stop strings must end behind the
    characters of the first `min_tokens` tokens."""

    def __init__(self, decoder: TextStream, stop: Sequence[str], min_tokens: int) -> None:
        self.num_tokens = 0  # that belong to the answer
        # a stop string was found: tokens that follow it are not passed on, nor counted
        self.stopped = False
        self._decoder = decoder
        self._stop = stop
        self._min_tokens = min_tokens
        # where there are stop strings:
        self._text = ""  # decoded so far
        self._sent = 0  # characters of it that were passed on
        self._min_chars = 0  # of the first `min_tokens` tokens

    def push(self, ids: Sequence[int]) -> str:
        """The text that may be passed on now. With stop strings, each token is looked at alone, so
        that the answer ends with the one that completes a stop string, however they came."""
        if not self._stop:
            self.num_tokens += len(ids)
            return self._decoder.push(ids)
        new = ""
        for token in ids:
            if self.stopped:
                break
            self.num_tokens += 1
            self._append(self._decoder.push((token,)))
            new += self._up_to_stop(last=False)
        return new

    def finish(self) -> str:
        """The rest of the text: no more tokens come."""
        rest = self._decoder.finish()
        if not self._stop:
            return rest
        self._append(rest)
        return "" if self.stopped else self._up_to_stop(last=True)

    def _append(self, text: str) -> None:
        self._text += text
        if self.num_tokens <= self._min_tokens:
            self._min_chars = len(self._text)

    def _up_to_stop(self, last: bool) -> str:
        """What of the text may be passed on: nothing from a stop string on, nor what may be the
        start of one. The stop string that is complete first counts (of those, the longest), so it
        does not matter how the text was cut."""
        found = [(at + len(stop), at) for stop in self._stop if (at := self._find(stop)) >= 0]
        end = len(self._text)
        if found:
            self.stopped = True
            _, end = min(found)
        elif not last:
            end -= max(self._num_held_back(stop) for stop in self._stop)
        new = self._text[self._sent : end]
        self._sent = end
        return new

    def _find(self, stop: str) -> int:
        return self._text.find(stop, max(self._sent, self._min_chars + 1 - len(stop)))

    def _num_held_back(self, stop: str) -> int:
        """How many characters at the end of the text may be the start of `stop`."""
        longest = min(len(stop) - 1, len(self._text))
        return next((k for k in range(longest, 0, -1) if self._text.endswith(stop[:k])), 0)
