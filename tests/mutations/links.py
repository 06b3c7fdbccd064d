"""Mutations of links: each takes one check away, most of them of authentication, and names the tests that must fail.

Read by the script that applies them. A tuple is: name, file, the text to replace (it occurs once), what to put in its
place, and the tests, each of which must fail then. Where a check is tested with two users for real, as root, and with a
user that is made up, the test that runs for everyone is named."""

from __future__ import annotations

SHM, ENDPOINT, ZMQ = (f"stretto/connector/{name}.py" for name in ("shm", "endpoint", "zmqsocket"))
PENDING, SLOTS = (f"stretto/connector/{name}.py" for name in ("pending", "slots"))
LINKING, LIFE = "stretto/orchestrator/linking.py", "stretto/control/life.py"
ENDS, OUTBOX = "stretto/stage/ends.py", "stretto/stage/outbox.py"

_SHM = "tests/contract/test_strangers_shm.py::test_"
_NET = "tests/contract/test_strangers_net.py::test_"
_ENDPOINT = "tests/connector/test_endpoint.py::test_"
_PENDING = "tests/connector/test_pending.py::test_"
_LINKS = "tests/orchestrator/test_links.py::test_"
_ENDS = "tests/stage/test_ends.py::test_"
_OUTBOX = "tests/stage/test_outbox.py::test_"

MUTATIONS: list[tuple[str, str, str, str, list[str]]] = [
    # -- shm, the receiver
    (
        "shm: a connection of another user is accepted",
        SHM,
        "                if not _is_ours(self._pending):\n",
        "                if False:\n",
        [_SHM + "another_user_is_refused_whatever_it_says"],
    ),
    (
        "shm: a connection of another user is waited for, and refused only then",
        SHM,
        "                if not _is_ours(self._pending):\n"
        '                    raise ConnectionRefusedError("another user")\n'
        "            set_timeout(self._pending, min(timeout, _HELLO_S))\n"
        "            self._admit(self._pending)\n",
        "            set_timeout(self._pending, min(timeout, _HELLO_S))\n"
        "            self._admit(self._pending)\n"
        "            if self.socket is not None and not _is_ours(self.socket._sock):\n"
        '                raise ConnectionRefusedError("another user")\n',
        [_SHM + "another_user_that_says_nothing_is_not_waited_for"],
    ),
    (
        "shm: any user is ours",
        SHM,
        "    return _peer_uid(sock) == os.geteuid()\n",
        "    return True\n",
        [
            _SHM + "another_user_is_refused_whatever_it_says",
            _SHM + "a_listener_of_another_user_is_not_spoken_to",
        ],
    ),
    (
        "shm: the hello is not compared",
        SHM,
        "if not hmac.compare_digest(hello, self._hello) or len(fds) != 1:",
        "if len(fds) != 1:",
        [_SHM + f"a_hello_of_another_link_is_refused[{what}]" for what in ("generation", "nonce", "secret")],
    ),
    (
        "shm: only the hello's beginning is compared",
        SHM,
        "if not hmac.compare_digest(hello, self._hello) or len(fds) != 1:",
        "if not self._hello.startswith(hello) or len(fds) != 1:",
        [_SHM + "the_beginning_of_a_hello_is_none"],
    ),
    (
        "shm: a hello need not bring memory",
        SHM,
        "if not hmac.compare_digest(hello, self._hello) or len(fds) != 1:",
        "if not hmac.compare_digest(hello, self._hello):",
        [_SHM + "a_hello_without_memory_is_refused"],
    ),
    (
        "shm: memory of any size",
        SHM,
        "if os.fstat(memory).st_size != size or fcntl.fcntl",
        "if fcntl.fcntl",
        [_SHM + "memory_that_was_not_agreed_is_refused[short]", _SHM + "memory_that_was_not_agreed_is_refused[long]"],
    ),
    (
        "shm: memory that may shrink",
        SHM,
        " or fcntl.fcntl(memory, fcntl.F_GET_SEALS) & _SEALS != _SEALS:",
        ":",
        [_SHM + "memory_that_was_not_agreed_is_refused[may shrink]"],
    ),
    (
        "shm: a silent connection stays",
        SHM,
        "if time.monotonic() >= self._pending_until:",
        "if False:",
        [_SHM + "who_never_says_hello_is_let_go_after_a_while"],
    ),
    (
        "shm: a refused connection's descriptors stay open",
        SHM,
        "            for fd in fds:\n                os.close(fd)\n",
        "            pass\n",
        [_SHM + "a_crowd_leaves_nothing_behind"],
    ),
    (
        "shm: the listener stays when the sender is in",
        SHM,
        "        self.arrivals = self.socket.arrivals\n        self._listener.close()\n",
        "        self.arrivals = self.socket.arrivals\n",
        [_SHM + "when_the_sender_is_in_nobody_else_can_come"],
    ),
    (
        "shm: a chunk of any generation, by the fast path",
        SHM,
        "                    and generation == self._generation\n",
        "",
        [_SHM + "a_chunk_of_another_generation_ends_the_link[4]"],
    ),
    # -- shm, the sender
    (
        "shm: a listener of another user is spoken to",
        SHM,
        "            if not _is_ours(sock):\n",
        "            if False:\n",
        [_SHM + "a_listener_of_another_user_is_not_spoken_to"],
    ),
    (
        "shm: a sender gives up at once where the listener's queue is full",
        SHM,
        "            set_connect_timeout(sock, options.connect_timeout_s)\n",
        "            sock.settimeout(options.connect_timeout_s)\n",
        [_SHM + "a_sender_waits_for_its_place_in_a_full_queue"],
    ),
    # -- endpoints: shm, tcp and mooncake
    (
        "endpoint: no secret is needed",
        ENDPOINT,
        "    if options.secret is None or len(options.secret) < SECRET_BYTES:\n",
        "    if options.secret is None:\n        return bytes(SECRET_BYTES)\n    if False:\n",
        [
            _ENDPOINT + f"nobody_{does}_without_a_secret[{name}-0.0.0.0-{secret}]"
            for does in ("listens", "connects")
            for name in ("shm", "tcp")
            for secret in ("none", "short")
        ],
    ),
    (
        "endpoint: any secret will do",
        ENDPOINT,
        " or len(options.secret) < SECRET_BYTES:",
        ":",
        [_ENDPOINT + "nobody_listens_without_a_secret[tcp-0.0.0.0-empty]"],
    ),
    (
        "endpoint: of any connector",
        ENDPOINT,
        "    if endpoint.connector != connector:\n",
        "    if False:\n",
        [_ENDPOINT + "an_endpoint_of_another_connector_or_secret_is_refused"],
    ),
    (
        "endpoint: the seal is not compared",
        ENDPOINT,
        '    if not hmac.compare_digest(endpoint.details.get("seal", ""), _seal_of(endpoint, secret_of(endpoint.link, '
        "options))):\n",
        "    if secret_of(endpoint.link, options) is None:\n",
        [
            _ENDPOINT + "an_endpoint_is_taken_as_it_was_made_or_not_at_all[address]",
            _ENDPOINT + "details_are_sealed_too[{'more': '2'}]",
            "tests/contract/test_connectors.py::test_an_endpoint_that_was_changed_is_refused[shm-nonce]",
        ],
    ),
    (
        "endpoint: the seal is not keyed by the secret",
        ENDPOINT,
        'hmac.digest(secret, said, "sha256")',
        'hmac.digest(b"", said, "sha256")',
        [_ENDPOINT + "an_endpoint_of_another_connector_or_secret_is_refused"],
    ),
    (
        "endpoint: the hello is not keyed by the secret",
        ENDPOINT,
        'return hmac.digest(secret, f"stretto hello',
        'return hmac.digest(b"", f"stretto hello',
        [_ENDPOINT + "a_hello_needs_the_secret_and_the_endpoint"],
    ),
    (
        "endpoint: the hello does not depend on the endpoint",
        ENDPOINT,
        "stretto hello {endpoint.details['seal']}",
        "stretto hello",
        [_ENDPOINT + "a_hello_needs_the_secret_and_the_endpoint"],
    ),
    # -- networks, the receiver
    (
        "tcp: nothing is encrypted, at either end",
        "stretto/connector/curve.py",
        "    if listens:\n        socket.curve_server = True\n",
        "    if not listens or listens:\n        return\n    if listens:\n        socket.curve_server = True\n",
        [
            _NET + "a_plaintext_peer_is_refused_whatever_it_says",
            _NET + "a_listener_that_is_not_the_invited_one_is_told_nothing[plaintext]",
        ],
    ),
    (
        "tcp: the key does not come from the secret",
        "stretto/connector/curve.py",
        'hmac.digest(secret, f"stretto curve',
        'hmac.digest(b"", f"stretto curve',
        [
            _NET + "another_key_is_refused",
            _NET + "a_listener_that_is_not_the_invited_one_is_told_nothing[another key]",
        ],
    ),
    (
        "tcp: the hello is not compared",
        ZMQ,
        'if len(frames) == 3 and len(said) == 2 and hmac.compare_digest(b"".join(said), b"".join(self._hello)):',
        "if len(frames) == 3 and len(said) == 2:",
        [
            _NET + f"who_has_the_key_but_not_the_hello_is_refused[{what}]"
            for what in ("generation", "nonce", "secret", "a chunk")
        ],
    ),
    (
        "tcp: a hello is one whatever comes behind it",
        ZMQ,
        "if len(frames) == 3 and len(said) == 2 and",
        "if len(said) == 2 and",
        [_NET + "who_has_the_key_but_not_the_hello_is_refused[more]"],
    ),
    (
        "tcp: who is refused stays connected",
        ZMQ,
        "            self._pending.refuse(fd)\n",
        "            pass\n",
        [_NET + "who_has_the_key_but_not_the_hello_is_refused[secret]"],
    ),
    (
        "tcp: others than the peer are heard",
        ZMQ,
        "            return who == self._peer\n",
        "            return True\n",
        [_NET + "when_the_sender_is_in_strangers_are_neither_heard_nor_kept"],
    ),
    (
        "tcp: pending connections stay when the sender is in",
        ZMQ,
        "self._pending.shut_down(everyone=bool(self._peer))",
        "self._pending.shut_down()",
        [_NET + "when_the_sender_is_in_strangers_are_neither_heard_nor_kept"],
    ),
    (
        "tcp: pending connections do not expire while a take waits",
        ZMQ,
        "self._receive(min(timeout, self._pending.time_left()))",
        "self._receive(timeout)",
        [_NET + "a_take_that_waits_lets_the_silent_go_too"],
    ),
    (
        "tcp: a stranger's end is taken for the peer's",
        ZMQ,
        "                    left = False  # the one that left was pending, and the peer has its descriptor now\n",
        "                    pass\n",
        [_NET + "a_stranger_that_had_the_senders_descriptor_before_it_does_not_end_the_link"],
    ),
    (
        "tcp: events are looked at before messages",
        ZMQ,
        "        of_peer = [frames for frames in messages if self._is_peer(frames)]\n"
        "        # After the messages: the peer may have sent its hello and left since the last poll.\n"
        "        self._handle_events(events)\n",
        "        self._handle_events(events)\n"
        "        of_peer = [frames for frames in messages if self._is_peer(frames)]\n",
        [_NET + "a_sender_that_said_hello_and_died_at_once_is_dead"],
    ),
    (
        "tcp: messages of any size",
        ZMQ,
        "        self._socket.setsockopt(zmq.MAXMSGSIZE, most_bytes)\n",
        "",
        [_NET + "a_message_larger_than_a_slot_is_refused_by_its_length"],
    ),
    # -- pending connections
    (
        "pending: the silent stay",
        PENDING,
        "            late = self.clock() - since >= HELLO_S\n",
        "            late = False\n",
        [_PENDING + "who_says_nothing_is_shut_when_its_time_is_over"],
    ),
    (
        "pending: any number",
        PENDING,
        " or len(self._since) > MAX_PENDING or ",
        " or ",
        [_PENDING + "the_oldest_make_room", _NET + "a_crowd_is_bounded_and_does_not_keep_the_sender_out"],
    ),
    (
        "pending: the refused stay",
        PENDING,
        " or fd in self._refused:",
        ":",
        [_PENDING + "who_was_refused_is_shut_as_soon_as_it_is_known"],
    ),
    (
        "pending: a refusal outlives its connection",
        PENDING,
        "        self._refused.discard(fd)\n",
        "",
        [_PENDING + "a_refusal_ends_with_its_connection"],
    ),
    (
        "pending: a descriptor is shut whoever has it now",
        PENDING,
        "                    if connection.getpeername() == address:\n",
        "                    if address:\n",
        [_PENDING + "another_connection_with_the_same_descriptor_is_left_alone"],
    ),
    # -- notes
    (
        "slots: a chunk of any generation",
        SLOTS,
        "if seq == self._next and kind == _CHUNK and generation == self._generation and len(held) < self._slots:",
        "if seq == self._next and kind == _CHUNK and len(held) < self._slots:",
        [
            _NET + "a_chunk_of_another_generation_ends_the_link",
            _SHM + "a_chunk_of_another_generation_ends_the_link[0]",
        ],
    ),
    (
        "slots: a release of any generation",
        SLOTS,
        "if kind == _RELEASE and sent == seq and generation == self._generation:",
        "if kind == _RELEASE and sent == seq:",
        [_NET + "a_release_of_another_generation_ends_the_link"],
    ),
    # -- chunks
    (
        "outbox: rows are never cut",
        OUTBOX,
        "        if len(span) == 1 or wire.encoded_size(chunk) <= slot_bytes:\n",
        "        if True:\n",
        [
            _OUTBOX + "media_rows_that_exceed_a_slot_are_cut_and_only_the_last_part_carries_the_mark",
            "tests/stage/test_link.py::test_thinker_rows[shm-all on-cut]",
        ],
    ),
    (
        "outbox: a chunk may not fill its slot",
        OUTBOX,
        "wire.encoded_size(chunk) <= slot_bytes",
        "wire.encoded_size(chunk) < slot_bytes",
        [_OUTBOX + "rows_that_fit_a_slot_are_one_chunk_and_are_not_copied"],
    ),
    (
        "outbox: each part carries the mark",
        OUTBOX,
        "slot_bytes, Mark.MORE, event)",
        "slot_bytes, mark, event)",
        [_OUTBOX + "media_rows_that_exceed_a_slot_are_cut_and_only_the_last_part_carries_the_mark"],
    ),
    (
        "outbox: a part is sent without its event",
        OUTBOX,
        "seq=self._seq, event=event)",
        "seq=self._seq)",
        [_OUTBOX + "every_part_carries_the_event_of_its_rows"],
    ),
    # -- the orchestrator
    (
        "orchestrator: no secret",
        LINKING,
        "secrets.token_bytes(SECRET_BYTES)",
        'b""',
        [_LINKS + "each_generation_of_each_link_has_a_secret_of_its_own"],
    ),
    (
        "orchestrator: the same secret for all",
        LINKING,
        "secrets.token_bytes(SECRET_BYTES)",
        "bytes(SECRET_BYTES)",
        [_LINKS + "each_generation_of_each_link_has_a_secret_of_its_own"],
    ),
    (
        "orchestrator: a link keeps its secret",
        LINKING,
        "secret = self._secrets[name] = secrets.token_bytes(SECRET_BYTES)",
        "secret = self._secrets.setdefault(name, secrets.token_bytes(SECRET_BYTES))",
        [_LINKS + "each_generation_of_each_link_has_a_secret_of_its_own"],
    ),
    (
        "messages: a link without a secret",
        LIFE,
        "Secret = Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]",
        "Secret = bytes",
        [_LINKS + "a_host_understands_no_link_without_a_secret[0]"],
    ),
    (
        "host: the secret is not handed on",
        ENDS,
        "            secret=m.secret,\n",
        "",
        [_ENDS + "both_ends_get_the_secret_and_the_generation_that_they_were_told"],
    ),
    (
        "host: another host's nonsense ends this one",
        ENDS,
        "    except (msgspec.MsgspecError, UnicodeDecodeError) as e:\n",
        "    except ZeroDivisionError as e:\n",
        [_ENDS + "nonsense_from_another_host_is_an_error_of_the_link[b'']"],
    ),
    (
        "host: no descriptor for a link ends the host",
        ENDS,
        "        except OSError as e:  # no descriptor to be had, say: it is tried again, and the stages here live\n",
        "        except ZeroDivisionError as e:\n",
        [_ENDS + "a_machine_that_has_no_more_of_something_is_an_error_of_the_link"],
    ),
]
