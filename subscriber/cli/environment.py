"""Names of environment variables that options of the commands take their defaults from."""

from __future__ import annotations

# The defaults of --target, --source and --apply-target are taken from these variables.
TARGET_VARIABLE = "SUBSCRIBER_TARGET_DSN"
SOURCE_VARIABLE = "SUBSCRIBER_SOURCE_DSN"
APPLY_VARIABLE = "SUBSCRIBER_APPLY_DSN"
# The default of --config.
CONFIG_VARIABLE = "SUBSCRIBER_CONFIG"
# The tokens of the console, or the file that has them.
TOKEN_VARIABLE = "SUBSCRIBER_HTTP_TOKEN"
TOKEN_FILE_VARIABLE = "SUBSCRIBER_HTTP_TOKEN_FILE"
