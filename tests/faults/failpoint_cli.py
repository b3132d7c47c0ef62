"""The command `subscriber` with one armed failpoint, for tests.

    python -m tests.faults.failpoint_cli POINT kill|stop TIMES ARGUMENTS…

The process sends SIGKILL, or SIGSTOP, to itself when it reaches POINT for the TIMESth time.
"""

from __future__ import annotations

import os
import signal
import sys

from subscriber.cli import main as cli_main
from subscriber.failpoints import Point, armed

HOW = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def main() -> None:
    point, how, times, *arguments = sys.argv[1:]
    left = int(times)

    def reached() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), HOW[how])

    armed[Point[point]] = reached
    sys.argv = ["subscriber", *arguments]
    cli_main.main()


if __name__ == "__main__":
    main()
