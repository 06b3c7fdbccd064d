"""Lines of the check of the CPU and of the page, each with what must fail without it.

(name, file, text that occurs once, text in its place, tests that must fail)."""

from __future__ import annotations

CPU = "stretto/cpu.py"
CPU_TESTS = "tests/test_cpu.py::"
STYLE = "stretto/server/web/style.css"
LOOKS = "tests/server/web/test_looks.py::"
PAGE = "tests/server/web/test_page.py::"

MUTATIONS: list[tuple[str, str, str, str, list[str]]] = [
    (
        "the limit is found but not set",
        CPU,
        "        environ[VARIABLE] = limit\n",
        "",
        [CPU_TESTS + "test_the_highest_limit_that_a_child_survives[AVX512_CORE_FP16]"],
    ),
    (
        "a user's value is overwritten",
        CPU,
        "    if any(name in environ for name in (VARIABLE, *OTHER_NAMES)):\n        return\n",
        "",
        [CPU_TESTS + f"test_the_users_value_stays[{name}]" for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")],
    ),
    (
        "CPUs without AMX are asked too",
        CPU,
        '    if not any(flag.startswith("amx") for flag in cpu.get("flags", "").split()):\n        return\n',
        "",
        [CPU_TESTS + "test_without_amx_nothing_is_asked_or_written[avx2]"],
    ),
    (
        "float32 and GPUs are checked too",
        CPU,
        '    if device == "cpu" and dtype in NARROW:\n',
        "    if True:\n",
        [
            CPU_TESTS + f"test_costs_nothing_where_it_cannot_matter[{case}]"
            for case in ("cpu-float32-False", "cuda-bfloat16-False")
        ],
    ),
    (
        "float16 is not checked",
        CPU,
        'NARROW = ("bfloat16", "float16")\n',
        'NARROW = ("bfloat16",)\n',
        [CPU_TESTS + "test_costs_nothing_where_it_cannot_matter[cpu-float16-True]"],
    ),
    (
        "nothing is kept",
        CPU,
        "            keep(kept, limit)\n",
        "",
        [CPU_TESTS + "test_it_is_found_out_once[lives0]"],
    ),
    (
        "a corrupt cache is believed",
        CPU,
        "    return word if word in (ALL, *LIMITS) else None\n",
        "    return word\n",
        [CPU_TESTS + "test_a_cache_that_makes_no_sense_is_written_anew[AVX]"],
    ),
    (
        "a cache that cannot be written ends the process",
        CPU,
        "        with contextlib.suppress(OSError):\n",
        "        with contextlib.nullcontext():\n",
        [CPU_TESTS + "test_a_cache_that_cannot_be_written"],
    ),
    (
        "hosts that start together all ask",
        CPU,
        "            fcntl.flock(lock, fcntl.LOCK_EX)\n",
        "",
        [CPU_TESTS + "test_one_asks_and_the_others_wait_for_it"],
    ),
    (
        "the version of torch is not part of the key",
        CPU,
        ', version("torch")]',
        "]",
        [CPU_TESTS + "test_another_cpu_or_torch_is_asked_anew"],
    ),
    (
        "the flags are not part of the key",
        CPU,
        'parts += [" ".join(sorted(cpu.get("flags", "").split())), ',
        "parts += [",
        [CPU_TESTS + "test_another_cpu_or_torch_is_asked_anew"],
    ),
    (
        "an illegal instruction is no trap",
        CPU,
        "TRAPS = (signal.SIGILL, ",
        "TRAPS = (",
        [CPU_TESTS + "test_a_child_that_dies_without_the_limit_only"],
    ),
    (
        "a child that ran out of memory counts as a trap",
        CPU,
        "    if -done.returncode in TRAPS:\n",
        "    if done.returncode:\n",
        [CPU_TESTS + "test_how_a_child_ends[killed]"],
    ),
    (
        "the child does not compute under its limit",
        CPU,
        "        env[VARIABLE] = limit\n",
        "        pass\n",
        [CPU_TESTS + "test_a_child_that_dies_without_the_limit_only"],
    ),
    (
        "lower limits are not tried",
        CPU,
        "    for limit in (None, *LIMITS):\n",
        "    for limit in (None, LIMITS[0]):\n",
        [CPU_TESTS + "test_the_highest_limit_that_a_child_survives[AVX2]"],
    ),
    (
        "hosts and solo do not ask",
        "stretto/models/weights.py",
        '    cpu.prepare(device.type, str(dtype).removeprefix("torch."))\n',
        "",
        [
            CPU_TESTS + "test_a_host_decides_before_anything_is_computed",
            CPU_TESTS + "test_every_source_of_weights_asks",
        ],
    ),
    (
        "the tests do not ask",
        "tests/conftest.py",
        "cpu.limit_onednn(os.environ)\n",
        "",
        [CPU_TESTS + "test_tests_decide_before_anything_is_computed"],
    ),
    (
        "the page grows with its widest part",
        STYLE,
        "  grid-template: auto minmax(0, 1fr) / minmax(0, 1fr);\n",
        "  grid-template-rows: auto minmax(0, 1fr);\n",
        [LOOKS + "test_nothing_sticks_out[answered]"],
    ),
    (
        "the state stands beside the name on a phone",
        STYLE,
        "  .top { display: grid; grid-template-columns: minmax(0, 1fr) auto; gap: 0 4px; }\n",
        "",
        [LOOKS + "test_nothing_sticks_out[locked]"],
    ),
    (
        "settings grow with their widest field",
        STYLE,
        ".settings form { display: grid; grid-template-columns: minmax(0, 1fr); gap: 8px; }",
        ".settings form { display: grid; gap: 8px; }",
        [LOOKS + "test_nothing_sticks_out[settings]"],
    ),
    (
        "figures keep to one line",
        STYLE,
        ".small { display: flex; flex-wrap: wrap; ",
        ".small { display: flex; ",
        [LOOKS + "test_nothing_sticks_out[answered]"],
    ),
    (
        "trouble may be as high as it likes",
        STYLE,
        ".notice { max-height: 40dvh; overflow-y: auto; display: flex;",
        ".notice { display: flex;",
        [LOOKS + "test_nothing_sticks_out[failed]"],
    ),
    (
        "attachments may be as high as they like",
        STYLE,
        " max-height: 112px; overflow-y: auto; }",
        " }",
        [LOOKS + "test_nothing_sticks_out[composing]"],
    ),
    (
        "the score leaves no room for the question",
        STYLE,
        "  .talk { flex: 1 0 0; min-height: min-content; gap: 8px; }\n",
        "  .talk { flex: 1; }\n",
        [LOOKS + "test_nothing_sticks_out[composing]"],
    ),
    (
        "the picture stretches its lanes",
        STYLE,
        " aspect-ratio: auto;",
        "",
        [LOOKS + "test_the_picture_is_as_high_as_its_lanes"],
    ),
    (
        "a gap is not counted",
        "stretto/server/web/player-worklet.js",
        "    this.underruns += 1;\n",
        "",
        [PAGE + "test_a_gap_is_counted_and_told"],
    ),
    (
        "the end of a stream counts as a gap",
        "stretto/server/web/player-worklet.js",
        '    if (this.ended) {\n      this.state = "idle";\n      return "drained";\n    }\n',
        "",
        [PAGE + "test_what_comes_in_time_is_played_without_a_gap"],
    ),
    (
        "a busy server is asked again at once",
        "stretto/server/web/trouble.js",
        "error.retryAfter ?? 2 ** (retries - 1)",
        "0",
        [PAGE + "test_busy_server_is_asked_again_after_the_time_it_named"],
    ),
    (
        "a click of the microphone's button is a hold",
        "stretto/server/web/talkbutton.js",
        "const HOLD_MS = 350;",
        "const HOLD_MS = 0;",
        [PAGE + "test_spoken_question_is_sent_as_sound[click]"],
    ),
    (
        "a hold of the microphone's button is a click",
        "stretto/server/web/talkbutton.js",
        'else if (this.phase === "on" && held) this.end();',
        "",
        [PAGE + f"test_spoken_question_is_sent_as_sound[{way}]" for way in ("hold", "space")],
    ),
    (
        "a refused question takes the last answer's timing away",
        "stretto/server/web/app.js",
        "  if (turn.nothing && shown === turn) showTurn(latestTurn()); // a refused question has no timing\n",
        "",
        [LOOKS + "test_nothing_sticks_out[refused]"],
    ),
    (
        "a file of no use is left out in silence",
        "stretto/server/web/attachments.js",
        "        this.onError(error.message, `You can attach ${taken()}.`);\n",
        "",
        [LOOKS + "test_nothing_sticks_out[attached]"],
    ),
    (
        "the timing is open at first",
        "stretto/server/web/app.js",
        '=== "open";',
        '!== "closed";',
        [LOOKS + "test_nothing_sticks_out[empty]"],
    ),
    (
        "noise is not called noise",
        "stretto/server/web/app.js",
        'const noise = model.random ? " Its weights are random: what it says is noise." : "";',
        'const noise = "";',
        [LOOKS + "test_nothing_sticks_out[noise]"],
    ),
    (
        "what is kept of a conversation grows without end",
        "stretto/server/web/kept.js",
        "  while (kept.length && size() > MOST_LETTERS) kept = kept.slice(1);\n",
        "",
        [PAGE + "test_what_is_kept_has_an_end"],
    ),
    (
        "work done before the turn was over counts as a wait",
        "stretto/server/web/turn.js",
        "  let before = Math.max(0, last - making);",
        "  let before = 0;",
        [PAGE + "test_the_parts_of_a_live_answer"],
    ),
]
