"""`python -m subscriber` is the command `subscriber`."""

from __future__ import annotations

from subscriber.cli.main import main

if __name__ == "__main__":
    main()
