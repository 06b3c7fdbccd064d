"""Puts the digest of each image that deploy/ names behind its tag, so that the same bytes are used
from then on.

    .venv/bin/python scripts/digests.py                    # asks the registries, by skopeo
    .venv/bin/python scripts/digests.py --resolver "crane digest"

A resolver is a command that is given a name with its tag and prints the digest. The tag stays, for
people; where there is a digest, it decides. Run it again to take a newer one, and commit what it
changed."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
FILES = ("Containerfile", "compose.yaml")
IMAGE = re.compile(r"(?P<name>docker\.io/[\w./-]+:[\w.-]+)(?:@sha256:[0-9a-f]{64})?")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
SKOPEO = "skopeo inspect --format {{.Digest}}"


def with_digests(text: str, resolve: Callable[[str], str]) -> str:
    return IMAGE.sub(lambda found: f"{found['name']}@{resolve(found['name'])}", text)


def by_command(command: str) -> Callable[[str], str]:
    known: dict[str, str] = {}

    def resolve(name: str) -> str:
        if name not in known:
            where = f"docker://{name}" if command == SKOPEO else name
            done = subprocess.run(
                [*shlex.split(command), where], capture_output=True, text=True, check=False
            )
            digest = done.stdout.strip()
            if done.returncode or not DIGEST.fullmatch(digest):
                why = (done.stderr.strip() or digest or f"status {done.returncode}").splitlines()[
                    -1
                ]
                raise SystemExit(f"{name}: no digest ({why})")
            known[name] = digest
        return known[name]

    return resolve


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--resolver", default=SKOPEO, metavar="COMMAND")
    p.add_argument("--folder", type=Path, default=DEPLOY, help=argparse.SUPPRESS)
    args = p.parse_args()
    resolve = by_command(args.resolver)
    texts = {args.folder / name: (args.folder / name).read_text() for name in FILES}
    new = {
        path: with_digests(text, resolve) for path, text in texts.items()
    }  # all of them, or none
    for path, text in new.items():
        path.write_text(text)
        print(f"{path.name}: {len(IMAGE.findall(text))} images")
    return 0


if __name__ == "__main__":
    sys.exit(main())
