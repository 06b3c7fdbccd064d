"""A stage with its links: what turns control messages and chunks into requests, and outputs into chunks and reports.

One node per stage of a host, driven by the loop: `admit`, `cancel` and `throttle` come as messages, `turn` takes what
has arrived on the link in, gives the stage its turn and flushes the link out. All on the loop thread. A node never
waits: a full link leaves chunks in the outbox and marks their request as blocked, so that only it stops."""

from __future__ import annotations

from stretto.stage.nodes.code2wav import Code2WavNode
from stretto.stage.nodes.talker import TalkerNode
from stretto.stage.nodes.thinker import ThinkerNode

Node = ThinkerNode | TalkerNode | Code2WavNode
