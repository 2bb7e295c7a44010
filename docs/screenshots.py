"""Create the pictures of the README, run.svg and row.svg, from the bundled sample.

    packcorpus pack in a pseudo-terminal ─▶ a frame of its progress and its final output ─┬─▶ rich ─▶ SVG
    packcorpus inspect --at FILE:LINE, with colors forced ────────────────────────────────┘

    python docs/screenshots.py [docs/assets]

The pictures use no font that would have to be downloaded.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from contextlib import suppress
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "data" / "sample" / "corpus.yaml"
# A conversation of the sample that fits in a picture.
SHOWN = "sharegpt.json:23"

# rich's own template without its web font, its window buttons and its shadow.
TEMPLATE = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<title>{title}</title>
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; \
font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>{lines}</defs>
<rect fill="#0c0c0c" width="{width}" height="{height}" rx="8"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""
_COLORS = [
    (12, 12, 12), (231, 72, 86), (22, 198, 12), (229, 192, 75), (59, 120, 255), (214, 112, 214), (97, 214, 214),
    (204, 204, 204),
]  # fmt: skip
THEME = TerminalTheme((12, 12, 12), (204, 204, 204), _COLORS, [(96, 96, 96), *_COLORS[1:]])


def on_terminal(words: list[str], folder: Path, columns: int) -> tuple[int, str]:
    """Run a command in a pseudo-terminal; return its exit code and output."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = os.environ | {"LUIGI_CONFIG_PATH": str(ROOT / "luigi.cfg"), "TERM": "xterm"}
    run = subprocess.Popen([str(BIN / words[0]), *words[1:]], cwd=folder, env=env, stdout=child, stderr=child)
    os.close(child)
    written = b""
    with suppress(OSError):  # on Linux, this means that the other end is closed
        while chunk := os.read(parent, 1 << 16):
            written += chunk
    os.close(parent)
    return run.wait(timeout=60), written.decode()


def capture_run(columns: int) -> str:
    """Return the command, a frame from the middle of the run, and the final lines."""
    words = ["packcorpus", "pack", "data/sample/corpus.yaml"]
    with tempfile.TemporaryDirectory() as root:
        _, written = on_terminal([*words[:-1], str(SAMPLE)], Path(root), columns)
    text = written.replace("\r\n", "\n")
    drawings = re.findall(r"\r\x1b\[J((?:[^\r]|\r(?!\x1b))*?)\r\x1b\[\d+A", text)
    lines = re.sub(r"\r\x1b\[J(?:[^\r]|\r(?!\x1b))*?\r\x1b\[\d+A", "", text).replace("\r\x1b[J", "").splitlines()
    frames = [drawing for drawing in drawings if "conversations/s" in drawing and " left" in drawing]
    middle = frames[len(frames) // 2] if frames else ""
    return "\n".join([f"$ {' '.join(words)}", lines[0], middle.rstrip(), "", *lines[1:]])


def capture_conversation(columns: int) -> str:
    """Return the command that shows a conversation in its row, and its output."""
    words = ["packcorpus", "inspect", "--at", SHOWN]
    env = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(columns), "TERM": "xterm", "TTY_COMPATIBLE": "1"}
    env.pop("NO_COLOR", None)
    with tempfile.TemporaryDirectory() as root:
        luigi = [str(BIN / "luigi"), "--module", "pipeline", "PackCorpus", "--config", str(SAMPLE), "--quiet"]
        env["LUIGI_CONFIG_PATH"] = str(ROOT / "luigi.cfg")
        subprocess.run(luigi, cwd=root, env=env, check=True, capture_output=True)
        done = subprocess.run(
            [str(BIN / "packcorpus"), *words[1:]], cwd=root, env=env, check=True, capture_output=True, text=True
        )
    return f"$ {' '.join(words)}\n{done.stdout}"


def export(text: str, title: str, file: Path, columns: int) -> None:
    """Write terminal output as an SVG picture."""
    console = Console(record=True, width=columns, file=StringIO(), highlight=False, force_terminal=True)
    console.print(Text.from_ansi(text))
    template = TEMPLATE.replace("{title}", title)
    picture = console.export_svg(theme=THEME, code_format=template, unique_id=file.stem)
    file.write_text(re.sub(r"[ \t]+$", "", picture, flags=re.MULTILINE))
    print(f"{file}: {file.stat().st_size:,} bytes")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "assets"
    export(capture_run(100), "A run in a terminal", folder / "run.svg", 100)
    export(capture_conversation(100), "A conversation in its row", folder / "row.svg", 100)


if __name__ == "__main__":
    main()
