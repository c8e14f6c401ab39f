# SPDX-License-Identifier: Apache-2.0

import ast
import graphlib
import pathlib

from oslotest import base

import cinder_localstor

ROOT = pathlib.Path(cinder_localstor.__file__).parent
PACKAGE = ROOT.name

# From the top to the bottom; what is beside each other knows nothing of it.
LAYERS = (('cmd', 'driver', 'nova', 'scheduler'), ('moves',),
          ('peers', 'rows'), ('datapath',), ('node',), ('exception', 'opts'))
LEVELS = {name: level for level, names in enumerate(LAYERS)
          for name in names}
# Who puts a node together; all others know the interface alone.
BUILDERS = {'cmd', 'driver', 'node'}


def modules():
    """All modules of the package, by name, with all that each imports."""
    paths = {}
    for path in ROOT.rglob('*.py'):
        parts = path.relative_to(ROOT.parent).with_suffix('').parts
        paths['.'.join(parts).removesuffix('.__init__')] = path
    return {name: set(imported(ast.parse(path.read_text()), paths))
            for name, path in paths.items()}


def imported(tree, known):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = ['%s.%s' % (node.module, alias.name)
                     for alias in node.names]
            yield from (name if name in known else node.module
                        for name in names)


def is_ours(module):
    return module.startswith(PACKAGE + '.')


def layer(module):
    return module.split('.')[1]


class LayersTest(base.BaseTestCase):
    """Each layer calls only downwards."""

    def setUp(self):
        super().setUp()
        self.modules = modules()
        self.imports = [(name, found) for name, imports in
                        self.modules.items() if name != PACKAGE
                        for found in filter(is_ours, imports)]
        self.assertTrue(self.imports)

    def test_every_module_belongs_to_a_layer(self):
        self.assertEqual(set(LEVELS), {layer(name) for name in self.modules
                                       if name != PACKAGE})

    def test_no_layer_knows_what_is_above_or_beside_it(self):
        self.assertEqual([], [
            (name, found) for name, found in self.imports
            if layer(name) != layer(found)
            and LEVELS[layer(name)] >= LEVELS[layer(found)]])

    def test_tools_of_a_node_are_known_by_their_interface(self):
        self.assertEqual([], [
            (name, found) for name, found in self.imports
            if layer(found) == 'node' and layer(name) not in BUILDERS
            and found != PACKAGE + '.node.interface'])

    def test_modules_import_each_other_in_no_circle(self):
        graphlib.TopologicalSorter(self.modules).prepare()

    def test_what_runs_in_nova_needs_nothing_of_cinder(self):
        own = PACKAGE + '.nova'
        # Nova has its client.
        self.assertEqual([], [
            (name, found) for name, imports in self.modules.items()
            for found in imports if name.startswith(own)
            and found.partition('.')[0] in ('cinder', PACKAGE)
            and not found.startswith(own)])

    def test_nothing_else_needs_nova(self):
        own = PACKAGE + '.nova'
        self.assertEqual([], [
            (name, found) for name, imports in self.modules.items()
            for found in imports if not name.startswith(own)
            and found.startswith(('nova', own))])
