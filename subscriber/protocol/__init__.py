"""Bytes and messages: what a publisher sends, and what a subscriber answers.

`copy_data` is the envelope inside CopyData, `decode` and `encode` are the pgoutput messages in it
(`messages`, `tuples`), `wire` is the frontend/backend protocol around both. Pure: the standard
library only, no I/O, no clock. Whatever the bytes are, the only error is ProtocolError.
"""
