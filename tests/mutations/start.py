"""Guards of how a server starts, logs and ends, each with a change that takes it away and the tests that then fail.

(name, file, text that occurs once in it, what to put there, tests)"""

STDERR, LOGS, DOOR = "stretto/observe/stderr.py", "stretto/observe/logs.py", "stretto/server/door.py"
LISTENER, RUN, APP = "stretto/server/listener.py", "stretto/server/run.py", "stretto/server/app.py"
SETTING, SETTINGS, SECTION = "stretto/setting.py", "stretto/control/settings.py", "stretto/models/section.py"
POLICY = "deploy/kubernetes/networkpolicy.yaml"
SERVICE = "deploy/kubernetes/rayservice.yaml"


def log(*names: str) -> list[str]:
    return [f"tests/observe/test_stderr.py::test_{name}" for name in names]


def process(*names: str) -> list[str]:
    return [f"tests/server/test_process.py::test_{name}" for name in names]


def listening(*names: str) -> list[str]:
    return [f"tests/server/test_listener.py::test_{name}" for name in names]


def typed(*names: str) -> list[str]:
    return [f"tests/first_hour/test_mistakes.py::test_{name}" for name in names]


def deployed(*names: str) -> list[str]:
    return [f"tests/deploy/test_manifests.py::test_{name}" for name in names]


MUTATIONS = [
    # ---- the log
    ("logs are written on the event loop", LOGS, "sys.stderr = own = QueuedStderr(STDERR, notice)", "pass",
     process("a_log_that_nobody_reads_stops_nobody")),
    ("the queue has no end", STDERR, "self._size + len(data) <= self._limit", "True",
     log("what_finds_no_room_is_counted_and_told_where_it_is_missing")),
    ("no notice of dropped lines", STDERR, "        if self._unannounced and self._size <= self._limit // 2:",
     "        if False:", log("a_line_larger_than_the_queue_is_dropped_alone")),
    ("a broken pipe ends the thread", STDERR, "            except OSError:\n                return False",
     "            except InterruptedError:\n                return False", log("a_reader_that_is_gone_stops_nobody")),
    ("a pipe that is full for now takes nothing", STDERR, "except BlockingIOError:", "except InterruptedError:",
     log("a_pipe_that_its_reader_made_non_blocking_is_waited_for")),
    ("the last lines are lost", STDERR, "        atexit.register(self.drain)\n", "",
     log("a_process_writes_all_before_it_ends_one_line_a_record")),
    ("a process waits for ever at its end", STDERR, "end - time.monotonic()\n", "None\n",
     log("a_process_whose_stderr_nobody_reads_ends")),
    ("a forked child has a thread that is not there", STDERR, "self._writing, self._thread = 0, \"\", False, None",
     "self._writing = 0, \"\", False", log("a_process_writes_all_before_it_ends_one_line_a_record")),
    ("messages break lines", LOGS, ".translate(_ESCAPED)", "",
     log("a_process_writes_all_before_it_ends_one_line_a_record")),
    ("Unicode breaks lines of JSON", LOGS, "json.dumps(line)", "json.dumps(line, ensure_ascii=False)",
     log("a_process_writes_all_before_it_ends_one_line_a_record")),
    ("paths forge fields", DOOR, 'quote(path[:200], errors="replace")', "path[:200]",
     process("a_path_forges_nothing_in_the_log")),
    # ---- how it ends
    ("a second signal changes nothing", RUN, "            self._urgent.set()", "            pass",
     process("a_second_signal_ends_the_server_at_once")),
    ("signals end a start with their own status", "stretto/signals.py", "signal.signal(number, _end)", "pass",
     typed("a_signal_before_the_server_listens_to_any")),
    ("framed pages", "stretto/server/pages.py",
     "\"frame-ancestors 'none'; form-action 'self'\"", "\"form-action 'self'\"",
     ["tests/server/test_http.py::test_pages"]),
    # ---- addresses
    ("any file gives way to the socket", LISTENER, "if not stat.S_ISSOCK(mode):", "if False:",
     listening("what_is_no_socket_is_never_removed")),
    ("a socket in use gives way", LISTENER, "        except ConnectionRefusedError:", "        except TimeoutError:",
     listening("the_socket_of_a_server_that_is_gone_makes_room")),
    ("the socket of a busy server gives way", LISTENER,
     "        except OSError:  # its queue is full, or we may not ask\n            pass",
     "        except OSError:\n            path.unlink()\n            return",
     listening("a_server_that_takes_no_connections_now_has_its_socket_too")),
    ("a server removes any file at its path", LISTENER, "if _identity(self.path) == self.made:", "if True:",
     listening("a_server_removes_its_own_socket_alone")),
    ("a server leaves its socket", LISTENER, "                    self.path.unlink()", "                    pass",
     listening("a_socket_that_another_server_answers_is_left_to_it")),
    ("an address stays taken when another cannot be had", RUN, "            taken.callback(listeners[0].close)\n", "",
     listening("a_port_that_is_taken_names_its_flag")),
    ("metrics need no key", APP, "        self.keys.owner(request.headers)\n", "",
     listening("metrics_behind_a_key")),
    ("metrics at both ports", APP, "self.service.config.metrics and self.service.config.metrics_port is None",
     "self.service.config.metrics", listening("metrics_on_a_port_of_their_own")),
    ("too few files are no reason", RUN, "    if wanted < FEWEST_FILES:", "    if False:",
     typed("serve_with_too_few_files")),
    # ---- settings
    ("numbers that are none", SETTING, "not math.isfinite(value)", "False",
     ["tests/server/test_settings.py::test_every_number_is_finite"]),
    ("a context for nothing", SETTINGS, '"max_context": 32', '"max_context": 1', typed("serve_refuses_at_once")),
    ("any number of rows", SETTINGS, "    check_rows(config)\n", "",
     ["tests/stage/test_plan.py::test_more_rows_than_the_largest_captured_step_are_refused"]),
    ("the largest batch has no captured step", "stretto/stage/runner/graphs.py",
     "sorted({min(size, max_rows) for size in SIZES})", "[size for size in SIZES if size <= max_rows]",
     ["tests/stage/test_plan.py::test_every_batch_fits_into_a_captured_step"]),
    ("any number of layers", SECTION, "self.integer(key, low, MAX_PARTS)", "self.integer(key, low)",
     ["tests/models/test_config.py::test_a_million_layers_are_refused_before_one_is_made",
      "tests/models/qwen3_tts/test_config.py::test_a_million_layers_are_refused_before_one_is_made"]),
    ("any size", SECTION, "        if v > high:", "        if False:",
     ["tests/models/test_config.py::test_sizes_beyond_all_bounds_are_refused"]),
    ("a size that is no number", SECTION, "if not abs(v) <= MAX_NUMBER:", "if False:",
     ["tests/models/test_config.py::test_sizes_beyond_all_bounds_are_refused"]),
    # ---- pods
    ("workers have a token", SERVICE, "            automountServiceAccountToken: false\n", "",
     deployed("pods_have_no_rights_that_they_do_not_need")),
    ("a root that can be written", SERVICE, "                readOnlyRootFilesystem: true\n", "",
     deployed("pods_have_no_rights_that_they_do_not_need")),
    ("any system call", SERVICE, "type: RuntimeDefault", "type: Unconfined",
     deployed("pods_have_no_rights_that_they_do_not_need")),
    ("all pods reach the world", POLICY, "matchLabels: {app: stretto, ray.io/node-type: head}",
     "matchLabels: {app: stretto}", deployed("pods_reach_each_other_and_names_and_the_head_kubernetes")),
    ("credentials of a cloud", POLICY, ", except: [169.254.0.0/16]", "",
     deployed("pods_reach_each_other_and_names_and_the_head_kubernetes")),
]  # fmt: skip
