# SPDX-License-Identifier: Apache-2.0

from cinder_localstor import exception
from cinder_localstor.node import privileged


class FakeCommands:
    """Answers commands by their first words and keeps what was asked."""

    host = 'node1'
    timeout = 60

    def __init__(self):
        self.ran = []
        self._answers = {}

    def answer(self, words, *answers):
        """Answer in turn, the last one for ever; the newest plan counts."""
        self._answers.pop(words, None)
        self._answers[words] = list(answers)

    def fail(self, words, reason):
        self.answer(words, exception.CommandFailed(
            command=words, host=self.host, reason=reason))

    def hang(self, words):
        self.answer(words, exception.CommandTimedOut(
            command=words, host=self.host, seconds=60))

    def run(self, *arguments, timeout=None):
        # Whatever else is answered, root runs no other.
        assert arguments[0] in privileged.PROGRAMS, arguments
        return self.reply(' '.join(arguments))

    def run_in_turn(self, what, lines):
        for arguments in lines:
            self.run(*arguments)

    def hold(self, names, seconds):
        self.reply('hold %s %d' % (' '.join(names), seconds))
        return 4711

    def let_go(self, guard):
        self.reply('let go %d' % guard)

    def reply(self, line):
        self.ran.append(line)
        for words, answers in reversed(self._answers.items()):
            if line.startswith(words):
                answer = answers.pop(0) if len(answers) > 1 else answers[0]
                if isinstance(answer, Exception):
                    raise answer
                return answer
        return ''

    def ran_of(self, program):
        return [line for line in self.ran if line.startswith(program)]
