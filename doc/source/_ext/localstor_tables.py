# SPDX-License-Identifier: Apache-2.0
"""Tables that come from the code of the driver, so that they can't be old.

``localstor-states``
    States, owners, steps and transitions of a move.
``localstor-facts``
    What may be true of a move, and who knows it.
``localstor-steps``
    What each step does, and on which side.
``localstor-operations``
    What may be done with a volume in each state.
``localstor-events``
    What the message bus is told of moves.
``localstor-payload``
    The fields that each of these has.
``localstor-errors``
    The errors of the driver with their messages.
"""

import inspect
import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import docutils

from cinder_localstor import exception
from cinder_localstor.moves import gate
from cinder_localstor.moves import notifications
from cinder_localstor.moves import table

# A placeholder in a message: %(name)s
PLACEHOLDER = re.compile(r'%\((\w+)\)[sdr]')
# What docstrings put in quotes
QUOTED = re.compile(r'``?([^`]+)``?')

# A cell: paragraphs of words, each word with the node that shows it
Cell = list[list[nodes.Node]]


def states() -> list[tuple[table.State, table.Rules]]:
    """All states but the final ones, in order."""
    return list(table.TABLE.items())


def steps() -> list[table.Step]:
    """Each step once, in the order in which moves come to them."""
    found = dict.fromkeys(step for rules in table.TABLE.values()
                          for step in rules.steps)
    return list(found)


def errors() -> list[type[Exception]]:
    """The errors of the driver, as they stand in the module."""
    return [found for found in vars(exception).values()
            if inspect.isclass(found)
            and found.__module__ == exception.__name__]


def summary(documented: Any) -> str:
    """The first sentence of a docstring of its own, '' without one."""
    text = vars(documented).get('__doc__') if inspect.isclass(
        documented) else documented.__doc__
    return ' '.join((text or '').strip().split('\n\n')[0].split())


def _text(text: str) -> list[nodes.Node]:
    found: list[nodes.Node] = []
    for number, part in enumerate(QUOTED.split(text)):
        if part:
            found.append(_literal(part) if number % 2 else nodes.Text(part))
    return found


def _literal(text: str) -> nodes.literal:
    return nodes.literal(text, text)


def _literals(names: tuple[str, ...]) -> list[nodes.Node]:
    found: list[nodes.Node] = []
    for name in names:
        found += [nodes.Text(', '), _literal(name)] if found else [
            _literal(name)]
    return found


def _message(text: str) -> list[nodes.Node]:
    found: list[nodes.Node] = []
    for number, part in enumerate(PLACEHOLDER.split(text)):
        found.append(nodes.emphasis(part, part.replace('_', ' '))
                     if number % 2 else nodes.Text(part))
    return found


def _table(widths: tuple[int, ...], heads: tuple[str, ...],
           rows: list[tuple[Cell, ...]]) -> nodes.table:
    group = nodes.tgroup(cols=len(heads))
    group += [nodes.colspec(colwidth=width) for width in widths]
    head, body = nodes.thead(), nodes.tbody()
    head += _row(tuple([[nodes.Text(text)]] for text in heads))
    body += [_row(cells) for cells in rows]
    group += [head, body]
    return nodes.table('', group, classes=['colwidths-given'])


def _row(cells: tuple[Cell, ...]) -> nodes.row:
    row = nodes.row()
    for cell in cells:
        entry = nodes.entry()
        entry += [nodes.paragraph('', '', *words) for words in cell]
        row += entry
    return row


class States(docutils.SphinxDirective):
    """The table of states."""

    def run(self) -> list[nodes.Node]:
        """Make it."""
        return [_table((12, 12, 38, 38),
                       ('State', 'Driven by', 'Steps', 'Leaves it for'),
                       [self._row_of(*found) for found in states()])]

    def _row_of(self, state: table.State, rules: table.Rules
                ) -> tuple[Cell, ...]:
        serves = [_text('What is missing of the engine is built again, and '
                        'a lost source is connected again.')
                  ] if rules.serves else []
        done = [[nodes.Text('on the %s: ' % side.value),
                 *_literals(tuple(step.name for step in rules.steps
                                  if step.side is side))]
                for side in self._sides(rules)]
        return ([[_literal(state.value)]], [_text(rules.owner.value)],
                serves + (done or [_text('none')]),
                [self._leads(transition)
                 for transition in rules.transitions])

    def _sides(self, rules: table.Rules) -> list[table.Side]:
        return list(dict.fromkeys(step.side for step in rules.steps))

    def _leads(self, transition: table.Transition) -> list[nodes.Node]:
        words = [_literal(transition.to.value), nodes.Text(' when '),
                 *_literals(tuple(fact.value for fact in transition.facts))]
        if transition.identity is table.Identity.SWITCHES:
            words.append(nodes.Text('; the rows change places'))
        return words


class Facts(docutils.SphinxDirective):
    """The table of facts."""

    def run(self) -> list[nodes.Node]:
        """Make it."""
        return [_table((24, 14, 62), ('Fact', 'Known by', 'Is true when'), [
            ([[_literal(fact.value)]], [_text(fact.known_by)],
             [_text(fact.meaning)]) for fact in table.Fact])]


class Steps(docutils.SphinxDirective):
    """The table of steps."""

    def run(self) -> list[nodes.Node]:
        """Make it."""
        return [_table((24, 16, 60), ('Step', 'On', 'What it does'), [
            ([[_literal(step.name)]], [_text(step.side.value)],
             [_text(summary(step.do)), *self._beside(step)])
            for step in steps()])]

    def _beside(self, step: table.Step) -> list[list[nodes.Node]]:
        if not step.beside:
            return []
        return [[nodes.Text('At the same time as '), *_literals(
            tuple(other.name for other in step.beside))]]


class Operations(docutils.SphinxDirective):
    """The table of operations by state."""

    def run(self) -> list[nodes.Node]:
        """Make it."""
        states = [getattr(state, 'value', state) for state in gate.COLUMNS]
        return [_table(
            (22, *[11] * len(states)), ('To', *states),
            [([_text(operation.value)],
              *([_text(answers[state].value)] for state in gate.COLUMNS))
             for operation, answers in gate.TABLE.items()])]


class Events(docutils.SphinxDirective):
    """The table of events."""

    def run(self) -> list[nodes.Node]:
        """Make it."""
        return [_table((18, 24, 58), ('Event', 'State', 'What has happened'), [
            ([[_literal(event.value)]],
             [_literals(tuple(state.value for state, told
                              in notifications.EVENTS.items()
                              if told is event)) or _text('as before')],
             [_text(event.meaning)]) for event in notifications.Event])]


class Payload(docutils.SphinxDirective):
    """The table of a payload's fields."""

    def run(self) -> list[nodes.Node]:
        """Make it."""
        return [_table((28, 72), ('Field', 'What it says'), [
            ([[_literal(field.name)]], [_text(field.meaning)])
            for field in notifications.FIELDS])]


class Errors(docutils.SphinxDirective):
    """The table of errors."""

    def run(self) -> list[nodes.Node]:
        """Make it."""
        rows = []
        for error in errors():
            message = str(error.message)
            cell = []
            if PLACEHOLDER.sub('', message):
                cell.append(_message(message))
            if summary(error):
                cell.append(_text(summary(error)))
            rows.append(([[_literal(error.__name__)]], cell))
        return [_table((26, 74), ('Error', 'Message, and what it means'),
                       rows)]


def setup(app: Sphinx) -> dict[str, Any]:
    """Make the directives known."""
    app.add_directive('localstor-states', States)
    app.add_directive('localstor-facts', Facts)
    app.add_directive('localstor-steps', Steps)
    app.add_directive('localstor-operations', Operations)
    app.add_directive('localstor-events', Events)
    app.add_directive('localstor-payload', Payload)
    app.add_directive('localstor-errors', Errors)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
