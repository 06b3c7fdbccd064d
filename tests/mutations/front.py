"""Guards of the server's front, each with a change that takes it away and the tests that then fail.

(name, file, text that occurs once in it, what to put there, tests)"""

ORIGINS, DOOR = "stretto/server/origins.py", "stretto/server/door.py"
PROTOCOL, RUN, SOCKET = "stretto/server/protocol.py", "stretto/server/run.py", "stretto/server/websocket.py"


def pages(*names: str) -> list[str]:
    return [f"tests/server/test_origins.py::test_{name}" for name in names]


def connections(*names: str) -> list[str]:
    return [f"tests/server/test_connections.py::test_{name}" for name in names]


def frames(*names: str) -> list[str]:
    return [f"tests/server/test_websocket.py::test_{name}" for name in names]


MUTATIONS = [
    # ---- who may call
    ("any Host", ORIGINS, "if self.hosts is not None and name not in self.hosts", "if False", pages("rebinding")),
    (
        "any Host with a stated name",
        ORIGINS,
        "if any_host else stated |",
        "if stated or any_host else stated |",
        pages("other_names"),
    ),
    ("two Hosts", ORIGINS, "if len(given) != 1:", "if not given:", pages("there_is_one_host_and_it_is_a_name")),
    (
        "Host is not a name",
        ORIGINS,
        "        if name is None:",
        "        if False:",
        pages("there_is_one_host_and_it_is_a_name"),
    ),
    (
        "any Origin",
        ORIGINS,
        "if not self.allows(origin, host, scheme):",
        "if False:",
        pages("a_foreign_page_is_refused_before_anything_is_read"),
    ),
    (
        "any Origin without a key",
        ORIGINS,
        "(not config.allowed_origins and config.needs_key)",
        "(not config.allowed_origins)",
        pages("a_foreign_page_is_refused_before_anything_is_read"),
    ),
    (
        "own page of any name",
        ORIGINS,
        "own = match[2] == host and",
        "own =",
        pages("the_servers_own_page_behind_a_proxy"),
    ),
    (
        "own page without TLS",
        ORIGINS,
        'and (match[1] == "https" or scheme == "http")',
        "",
        pages("a_page_without_tls_is_not_that_of_a_server_with"),
    ),
    (
        "local pages though others are stated",
        ORIGINS,
        "(self.local_pages and is_loopback(match[3]))",
        "is_loopback(match[3])",
        pages("stated_origins_win"),
    ),
    (
        "no Vary",
        ORIGINS,
        "        return [_VARY]",
        "        return []",
        pages("other_routes_are_not_readable_for_foreign_pages"),
    ),
    (
        "any type of body",
        ORIGINS,
        'if given.partition(";")[0].strip().lower() != "application/json":',
        "if False:",
        pages("a_body_must_be_called_json"),
    ),
    (
        "no warning",
        ORIGINS,
        "if config.uds or config.needs_key or on_loopback(config):",
        "if True:",
        pages("who_is_warned"),
    ),
    (
        "the warning is not said",
        "stretto/server/command.py",
        "if words := warning(config):",
        "if False and (words := warning(config)):",
        pages("the_command_warns_in_one_line"),
    ),
    (
        "Origin counts for preflights only",
        DOOR,
        "if origin and (api or preflight):",
        "if origin and preflight:",
        pages("a_foreign_page_is_refused_before_anything_is_read"),
    ),
    (
        "Origin counts for /v1 only",
        DOOR,
        "if origin and (api or preflight):",
        "if origin and api:",
        pages("other_routes_are_not_readable_for_foreign_pages"),
    ),
    (
        "the body's type is not asked for",
        DOOR,
        '                check_json(headers, scope["path"].removeprefix(scope.get("root_path", "")))',
        "                pass",
        pages("a_simple_post_of_a_foreign_page"),
    ),
    (
        "WebSockets pass",
        DOOR,
        'if scope["type"] == "lifespan":',
        'if scope["type"] in ("lifespan", "websocket"):',
        pages("a_websocket_is_denied_in_http"),
    ),
    (
        "other scopes pass",
        DOOR,
        'if scope["type"] == "lifespan":',
        'if scope["type"] != "websocket":',
        pages("other_scopes_do_not_get_past_the_door"),
    ),
    # ---- bytes
    (
        "headers of any size",
        PROTOCOL,
        "if self.head_next and len(data) > room:",
        "if False:",
        connections("headers_are_bounded_however_they_are_cut"),
    ),
    (
        "pieces of headers do not add up",
        PROTOCOL,
        "self.head_bytes += len(rest)",
        "pass",
        connections("headers_are_bounded_however_they_are_cut"),
    ),
    (
        "a body in any number of pieces",
        PROTOCOL,
        "if self.pieces > MAX_PIECES:",
        "if False:",
        connections("pieces_of_a_body_are_bounded_in_one_read"),
    ),
    (
        "headers behind a body are the request's",
        PROTOCOL,
        "        else:  # behind the body: nobody reads it\n            self._count_piece()",
        "        else:\n            super().on_header(name, value)",
        connections("headers_behind_a_body_are_not_the_requests_and_are_bounded"),
    ),
    (
        "a header behind a body of any size",
        PROTOCOL,
        "if self.head_bytes > self.front.header_bytes:",
        "if False:",
        connections("headers_behind_a_body_are_not_the_requests_and_are_bounded"),
    ),
    (
        "a body that is refused, without a word",
        PROTOCOL,
        " or self._unanswered()",
        "",
        connections("pieces_of_a_body_are_bounded_in_one_read"),
    ),
    (
        "bytes of earlier requests add up",
        PROTOCOL,
        "self.head_bytes, self.head_next = 0, True",
        "self.head_next = True",
        connections("each_request_of_a_connection_has_its_own_bytes"),
    ),
    (
        "what is cut off is lost",
        PROTOCOL,
        "rest = view[room:]",
        'rest = b""',
        connections("a_body_does_not_count_as_headers"),
    ),
    (
        "bytes after the end are read",
        PROTOCOL,
        "        if self.transport.is_closing():\n            return\n        self._unset",
        "        self._unset",
        connections("what_comes_after_the_end_is_not_read"),
    ),
    (
        "a refusal within an answer",
        PROTOCOL,
        "if refusal.answer and (not self.busy or self._unanswered()):",
        "if refusal.answer:",
        connections("garbage_is_not_answered_in_the_middle_of_an_answer"),
    ),
    # ---- time
    (
        "silence",
        PROTOCOL,
        "        self.front.idle[self] = None\n        self._set_deadline()",
        "        self.front.idle[self] = None",
        connections("silence_ends"),
    ),
    (
        "later headers take any time",
        PROTOCOL,
        "        if not self.busy:\n            self._wait()",
        "        if False:\n            self._wait()",
        connections("headers_by_drops"),
    ),
    (
        "empty lines take any time",
        PROTOCOL,
        "if self.head_begun or self.head_bytes or not self.head_next:",
        "if self.head_begun or not self.head_next:",
        connections("headers_by_drops"),
    ),
    (
        "headers begun during an answer take any time",
        PROTOCOL,
        "            if self.head_begun or not self.head_next:",
        "            if False:",
        connections("a_request_begun_during_an_answer_must_end_after_it"),
    ),
    (
        "the deadline outlives the headers",
        PROTOCOL,
        "        self._unset_deadline()\n        super().on_headers_complete()",
        "        super().on_headers_complete()",
        connections("headers_in_time_are_the_end_of_it"),
    ),
    (
        "the deadline outlives a late body",
        PROTOCOL,
        "if not self.busy:  # the rest of a body",
        "if False:  # ",
        connections("the_rest_of_an_answered_body"),
    ),
    (
        "no keep-alive limit after a late body",
        PROTOCOL,
        "        elif self.deadline is None:",
        "        elif False:",
        connections("the_rest_of_an_answered_body"),
    ),
    (
        "an answer that is not taken stays",
        PROTOCOL,
        "        if now >= left:\n            self.transport.abort()",
        "        if now >= left:\n            pass",
        connections("an_answer_that_is_not_taken"),
    ),
    (
        "an answer that is taken slowly is cut",
        PROTOCOL,
        "        if now >= left:",
        "        if now:",
        connections("an_answer_that_is_not_taken"),
    ),
    (
        "TLS takes any time",
        RUN,
        "ssl_handshake_timeout=limit",
        "ssl_handshake_timeout=None",
        connections("a_client_that_never_speaks_tls"),
    ),
    # ---- number
    (
        "connections without end",
        PROTOCOL,
        "if len(self.connections) > self.front.max_connections:",
        "if False:",
        connections("the_longest_idle_makes_room"),
    ),
    (
        "busy ones are closed",
        PROTOCOL,
        "        if self.busy:\n            self.front.idle.pop(self, None)\n",
        "",
        connections("the_longest_idle_makes_room"),
    ),
    (
        "answered ones are not idle",
        PROTOCOL,
        "            self.front.idle[self] = None\n            if self.head_begun",
        "            if self.head_begun",
        connections("the_longest_idle_makes_room"),
    ),
    (
        "closed ones count",
        PROTOCOL,
        "        connections.discard(victim)",
        "        pass",
        connections("many_at_once_do_not_close_more_than_they_need"),
    ),
    (
        "closing ones stay",
        PROTOCOL,
        " or next((c for c in connections if c.transport.is_closing()), None)",
        "",
        connections("one_that_cannot_close_makes_room"),
    ),
    (
        "lost ones are kept",
        PROTOCOL,
        "    def connection_lost(self, exc: Exception | None) -> None:\n        self._forget()",
        "    def connection_lost(self, exc: Exception | None) -> None:",
        connections("nothing_is_kept_of_a_connection_that_is_gone"),
    ),
    (
        "WebSockets are kept",
        PROTOCOL,
        "        self._forget()\n        self.handle_websocket_upgrade()",
        "        self.handle_websocket_upgrade()",
        connections("nothing_is_kept_of_a_denied_websocket"),
    ),
    (
        "files for 1024 only",
        RUN,
        "resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))",
        "pass",
        connections("files_for_all_connections"),
    ),
    # ---- requests ahead
    (
        "requests ahead without end",
        PROTOCOL,
        "if len(self.pipeline) >= MAX_AHEAD:",
        "if False:",
        connections("requests_ahead_are_bounded"),
    ),
    (
        "bodies ahead stop the reading",
        PROTOCOL,
        "if self.cycle is not self.answering and len(self.cycle.body) + len(body) > AHEAD_BYTES:",
        "if False:",
        connections("bodies_ahead_are_bounded"),
    ),
    (
        "requests ahead stop the reading",
        PROTOCOL,
        "            self.flow.resume_reading()",
        "            pass",
        connections("nobody_holds_the_engine_by_asking_ahead"),
    ),
    (
        "the running request is not told",
        PROTOCOL,
        "            self.answering.disconnected = True\n            self.answering.message_event.set()",
        "            pass",
        connections("leaving_is_told_to_the_request_that_runs"),
    ),
    (
        "a WebSocket takes over an answer",
        PROTOCOL,
        "if self.busy:  # the answer that is being",
        "if False:  # ",
        connections("nobody_holds_the_engine_by_asking_ahead"),
    ),
    # ---- packets
    (
        "Nagle's algorithm",
        RUN,
        "socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)",
        "socket.socket(family)",
        connections("small_packets_do_not_wait"),
    ),
    # ---- frames
    (
        "frames are parsed at once",
        SOCKET,
        "elif at < len(data) and time.perf_counter() - began >= TURN_S:",
        "elif False:",
        frames("tiny_frames_leave_others_their_turn"),
    ),
    (
        "more is read beside a rest",
        SOCKET,
        "        if self.rest:\n            self.transport.pause_reading()",
        "        if False:\n            pass",
        frames("nothing_more_is_read_while_there_is_a_rest"),
    ),
    (
        "reading is not resumed",
        SOCKET,
        "if not self.rest and not self.read_paused:",
        "if False:",
        frames("tiny_frames_leave_others_their_turn"),
    ),
    (
        "reading is resumed though the app is busy",
        SOCKET,
        "if not self.rest and not self.read_paused:",
        "if not self.rest:",
        frames("nothing_is_read_before_the_app_has_taken_what_there_is"),
    ),
    (
        "any number of fragments",
        SOCKET,
        "if len(self.frames) < MAX_FRAGMENTS:",
        "if True:",
        frames("fragments_of_a_message_are_bounded"),
    ),
    (
        "any number of pongs",
        SOCKET,
        "if self.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:",
        "if False:",
        frames("who_takes_no_answers_to_its_pings_is_cut"),
    ),
]
