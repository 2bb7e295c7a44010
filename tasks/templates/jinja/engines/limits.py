"""Limits for templates, which are untrusted data."""

# Limit of CPU time, which does not depend on the load of the machine. All renderings of a short conversation take a
# millisecond, so a template that takes this long loops.
SECONDS = 6.0
# A conversation of so many messages has this time twice, and so on. The time of the slowest published template grows
# with the square of the messages: for 250 of them, it takes 2 s.
MORE_MESSAGES = 100
# The parent waits this many times as long in wall time, in case the child is blocked without using CPU.
PATIENCE = 20
# Bytes that the child may allocate in addition to its memory at the fork. A conversation has at most 16 MB
# (max_record_bytes), and a rendering holds a few copies of it.
MEMORY = 512 << 20
# Limit of one rendered text. A template writes its input about once, and an encoder takes up to 50 bytes per character.
MOST_CHARACTERS = 16 << 20
# Limit of turns × (messages + KB). Locating a turn takes two renderings, and each takes about 1 µs per message and 1 µs
# per KB, so this is 4 s or more.
MOST_WORK = 2_000_000
# The same for conversations that Jinja2 judges with the prompt of each turn. The slowest published template, that of
# Gemma 4, takes 0.5 ms per message, so this is 2 s.
MOST_JUDGED = 4000
