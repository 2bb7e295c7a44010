"""Run `packcorpus train chat RUN`: talk to the result of a run.

Standard output has only the answers. Everything else is standard error. Ctrl-C ends an answer, or else the program.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from packcorpus.tasks.core.errors import Interrupted, PackError, UsageError
from packcorpus.tasks.core.messages import format_error
from packcorpus.tasks.core.printable import counted, printable
from packcorpus.train.chat.subject import find_subject
from packcorpus.train.config import Parser
from packcorpus.train.machine import devices
from packcorpus.train.merge.find_run import run_parser

if TYPE_CHECKING:
    from packcorpus.tasks.conversations.model import Message
    from packcorpus.train.chat.dialog import Dialog
    from packcorpus.train.chat.speaker import Speaker


def parser() -> Parser:
    ours = run_parser(
        prog="packcorpus train chat",
        description="Talk to the result of a run, with the template and the tokenizer of its corpus. In a terminal, it "
        "is a dialog: Ctrl-C ends an answer, Ctrl-D or another Ctrl-C the program. Otherwise, standard input is one "
        "question.",
    )
    ours.add_argument("--prompt", metavar="TEXT", help="answer this question, and exit")
    ours.add_argument("--system", metavar="TEXT", help="the system message")
    ours.add_argument(
        "--max-tokens", type=int, metavar="N", default=512, help="most tokens of an answer (default: 512)"
    )
    text = "0: the most probable token each time; 1: tokens as probable as the model says (default: 0)"
    ours.add_argument("--temperature", type=float, metavar="X", default=0.0, help=text)
    ours.add_argument("--seed", type=int, metavar="N", default=42, help="seed of a temperature above 0 (default: 42)")
    return ours


def main(arguments: list[str]) -> int:
    """Answer questions and return 0."""
    options = parser().parse_args(arguments)
    if options.max_tokens < 1:
        raise UsageError("bad_command_line", f"--max-tokens {options.max_tokens}: must be at least 1")
    if not 0 <= options.temperature <= 10:
        raise UsageError("bad_command_line", f"--temperature {options.temperature:g}: must be from 0 to 10")
    if not 0 <= options.seed < 1 << 31:
        raise UsageError("bad_command_line", f"--seed {options.seed}: must be from 0 to {(1 << 31) - 1:,}")
    subject = find_subject(options.run, options.root)
    question = options.prompt
    is_dialog = question is None and sys.stdin.isatty()
    if question is None and not is_dialog:
        question = sys.stdin.read().strip()
    if not is_dialog and not question:
        raise UsageError("bad_command_line", "the question is empty; pass it as --prompt TEXT or as standard input")
    devices.check_libraries()
    print(printable(f"loading {subject}"), file=sys.stderr, flush=True)
    from packcorpus.train.chat.speaker import open_dialog, open_speaker

    dialog = open_dialog(subject, options.root)
    speaker = open_speaker(subject, dialog, options.max_tokens, options.temperature, options.seed)
    print(printable(f"{speaker}; {dialog.about}"), file=sys.stderr, flush=True)
    talk = Talk(dialog, speaker, options.system)
    signal.set_wakeup_fd(-1)  # so that SignalGuard does not end this process while it waits for a question
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, talk.on_ctrl_c)
    if not is_dialog:
        talk.answer(question)
        if speaker.is_stopped:
            raise Interrupted("interrupted", "interrupted: the answer is not complete")
        return 0
    print("Ctrl-C ends an answer, Ctrl-D the program.", file=sys.stderr, flush=True)
    talk.run()
    return 0


class Talk:
    """A dialog: the messages so far, and what answers them."""

    def __init__(self, dialog: Dialog, speaker: Speaker, system: str | None):
        from packcorpus.tasks.conversations.model import Message

        self._dialog, self._speaker = dialog, speaker
        self._messages: list[Message] = [Message("system", system)] if system else []
        self._is_answering = False

    def on_ctrl_c(self, number: int, frame: FrameType | None) -> None:
        """End the answer, or else the program."""
        if not self._is_answering:
            raise KeyboardInterrupt
        self._speaker.stop()

    def run(self, ask: Callable[[str], str] = input) -> None:
        """Answer questions until the input ends."""
        import readline  # noqa: F401 - `input` then edits lines

        while True:
            try:
                question = ask("> ").strip()
            except (EOFError, KeyboardInterrupt):
                print(file=sys.stderr)
                return
            if not question:
                continue
            try:
                self.answer(question)
            except PackError as error:  # another question may be accepted
                print(format_error(error), file=sys.stderr, flush=True)

    def answer(self, question: str) -> None:
        """Print the answer to a question, as it is generated."""
        from packcorpus.tasks.conversations.model import Message
        from packcorpus.train.chat.dialog import remembered

        asked = [*self._messages, Message("user", question)]
        prompt = self._dialog.prompt(asked)
        self._is_answering = True
        try:
            ids = self._speaker.answer(prompt)
        finally:
            self._is_answering = False
        print(flush=True)
        if not ids or ids[-1] not in self._dialog.stops:
            why = "stopped" if self._speaker.is_stopped else f"ended after {counted(len(ids), 'token')}: --max-tokens"
            print(f"[{why}]", file=sys.stderr, flush=True)
        self._messages = [*asked, remembered(self._dialog, prompt, ids)]
