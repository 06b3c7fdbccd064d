"""Guards of the prompt worker, bodies and slots."""

POOL, BODIES = "tests/prompt/test_pool.py", "tests/server/test_bodies.py"
WORKER, APART = "stretto/prompt/worker.py", "stretto/prompt/apart.py"

MUTATIONS = [
    (
        "CPU time of a job is limited",
        APART,
        "    _limit(resource.RLIMIT_CPU, int(used) + limits.cpu_s, 1)  # SIGXCPU, then SIGKILL\n",
        "",
        [f"{POOL}::test_limits_of_time_and_memory"],
    ),
    (
        "memory of a job is limited",
        APART,
        "    _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + (limits.memory_mb << 20))\n",
        "",
        [f"{POOL}::test_limits_of_time_and_memory"],
    ),
    (
        "a long job has the cores that nobody needs",
        APART,
        "        signal.setitimer(signal.ITIMER_PROF, SHORT_S)\n",
        "",
        [f"{POOL}::test_long_work_has_the_cores_that_nobody_needs"],
    ),
    (
        "jobs that are never short use up their credit",
        APART,
        "            if not short:\n                make_idle(self.pid)\n",
        "",
        [f"{POOL}::test_without_credit_a_job_has_the_cores_that_nobody_needs"],
    ),
    (
        "what a short job does not use goes back",
        APART,
        "        self.credit.give_back(taken - used)\n",
        "",
        [f"{POOL}::test_without_credit_a_job_has_the_cores_that_nobody_needs"],
    ),
    (
        "a short job does not wait for an idle core",
        APART,
        "os.SCHED_BATCH",
        "os.SCHED_IDLE",
        [f"{POOL}::test_children_wait_for_the_next_jobs"],
    ),
    (
        "a caller that leaves ends its process",
        "stretto/prompt/pool.py",
        "            self.worker.tell(Stop(call.number))\n",
        "",
        [f"{POOL}::test_a_caller_that_leaves_ends_its_process"],
    ),
    (
        "jobs die with the worker",
        APART,
        "            die_with_parent(worker)\n",
        "",
        [f"{POOL}::test_a_worker_that_dies_comes_back"],
    ),
    (
        "media are not decoded by the worker itself",
        WORKER,
        "            if only_text and work.has_media(messages):\n                return Apart(), None\n",
        "",
        [f"{POOL}::test_media_are_decoded_apart_however_small_their_file"],
    ),
    (
        "one sender never has all places",
        "stretto/prompt/fairqueue.py",
        "share = max(1, self.places - 1)",
        "share = self.places",
        [f"{POOL}::test_senders_take_turns"],
    ),
    (
        "a memory file from the worker is sealed",
        "stretto/prompt/spool.py",
        "if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:",
        "if False:",
        [f"{POOL}::test_what_a_worker_says_is_checked"],
    ),
    (
        "arrays lie within the features",
        "stretto/prompt/packed.py",
        "    if p.offset is not None and (p.offset < 0 or p.offset % 4 or p.offset + 4 * count > size):",
        "    if False:",
        [f"{POOL}::test_what_a_worker_says_is_checked"],
    ),
    (
        "a slot is taken when the body is there",
        "stretto/server/answer.py",
        "            with Body(self.service.bodies, visit.sender) as body:\n",
        "            async with self.service.admission.place('x'), Body(self.service.bodies, visit.sender) as body:\n",
        [f"{BODIES}::test_bodies_on_their_way_hold_no_slot"],
    ),
    (
        "all bodies together are bounded",
        "stretto/server/body.py",
        "        if not self.shares.take(self.owner, len(part)):",
        "        if self.shares.add(self.owner, len(part)):",
        [f"{BODIES}::test_all_bodies_together_are_bounded"],
    ),
    (
        "a body keeps a rate",
        "stretto/server/exchange.py",
        "                    deadline.reschedule(start + min(self.config.body_timeout, slowest))\n",
        "",
        [f"{BODIES}::test_a_body_must_keep_a_rate"],
    ),
    (
        "large bodies are not decoded on the event loop",
        "stretto/server/chat.py",
        "    if body.spool is None:\n        short, found = outline(",
        "    if True:\n        short, found = outline(",
        [f"{BODIES}::test_the_loop_decodes_nothing_large"],
    ),
]
