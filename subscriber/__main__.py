"""`python -m subscriber` is the command `subscriber`."""

from __future__ import annotations

from subscriber.ops.cli import main

if __name__ == "__main__":
    main()
