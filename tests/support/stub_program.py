"""A program for the fleet to run: announces its pid as its port, then does what its flags say."""

import argparse
import json
import os
import signal
import sys


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--announce-fd", type=int, required=True)
    parser.add_argument("--exit-code", type=int, help="end at once, without an announcement")
    parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
    flags = parser.parse_args()
    print(f"hello from {os.environ['STUB_NAME']}", flush=True)
    if flags.exit_code is not None:
        sys.exit(flags.exit_code)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if flags.deaf else signal.SIG_DFL)
    with os.fdopen(flags.announce_fd, "w") as pipe:
        pipe.write(json.dumps({"address": f"127.0.0.1:{os.getpid()}"}) + "\n")
    signal.pause()


if __name__ == "__main__":
    main()
